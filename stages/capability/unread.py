"""Settings that are stated and that nothing reads, since another one switches off what would.

They are no contradiction: what switches them off may be tried by hand, or be what a trainer sets
and ignores. But they are said, for whoever states them may mean to have them in force.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trajreplay.schema.settings import PROFILES, SECTIONS, Settings
from trajreplay.stages.capability.advantages import OF_NO_RETURNS
from trajreplay.stages.capability.read_where import Read
from trajreplay.stages.capability.unread_losses import OF_LOSSES, OF_VALUES


def _scores(settings: Settings) -> bool:
    return settings.reward.rule == "normalise" and settings.reward.grouping != "none"


def _divides(settings: Settings) -> bool:
    return _scores(settings) and settings.reward.divide_by_std


def _deviates(settings: Settings) -> bool:
    return _divides(settings) and settings.reward.divisor != "baseline"


def _whitens(settings: Settings) -> bool:
    return settings.advantage.whiten != "none"


def _best(settings: Settings) -> bool:
    """Whether the best of a group is scored over a deviation."""
    return settings.reward.rule == "pass@k" and settings.reward.divide_by_std


def _returns(settings: Settings) -> bool:
    return settings.advantage.estimator in _RETURNS


def _pays_kl(settings: Settings) -> bool:
    return settings.kl.coef != 0


_RETURNS = ("reinforce++", "gae", "remax", "otb")
_OF_REWARDS = (
    Read("reward", ("baseline", "lone"), _scores, "where rewards are normalised"),
    Read("reward", ("divisor",), _divides, "where rewards are divided by reward.divide_by_std"),
    Read(
        "reward",
        ("std_grouping", "epsilon_place"),
        _deviates,
        "where rewards are divided by a deviation",
    ),
    Read(
        "reward",
        ("ddof",),
        lambda one: _deviates(one) or _best(one) or one.reward.rescale != "none",
        "where rewards are divided by a deviation",
    ),
    Read(
        "reward",
        ("epsilon",),
        lambda one: _deviates(one) or _best(one),
        "where rewards are divided by a deviation",
    ),
    Read(
        "reward",
        ("missing",),
        lambda one: one.reward.grouping != "none" or bool(one.reward.weights),
        "where rewards are normalised or summed up",
    ),
    Read(
        "reward",
        ("baseline_counts",),
        lambda one: one.reward.baseline == "length-weighted",
        "by the baseline 'length-weighted'",
    ),
    Read(
        "reward",
        ("overlong_counts", "overlong_buffer", "overlong_penalty", "overlong_floored"),
        lambda one: one.reward.overlong_max_length is not None,
        "beside reward.overlong_max_length",
    ),
    Read(
        "reward",
        ("stop_properly_rule",),
        lambda one: one.reward.stop_properly_coef is not None,
        "beside reward.stop_properly_coef",
    ),
    Read(
        "reward",
        ("step_gamma",),
        lambda one: one.reward.unit == "step",
        "where reward.unit is 'step'",
    ),
    Read(
        "reward",
        ("constant_within",),
        lambda one: one.reward.constant_groups != "keep",
        "where reward.constant_groups are not kept",
    ),
    Read(
        "reward", ("gpg_norm",), lambda one: one.reward.rule == "gpg", "where reward.rule is 'gpg'"
    ),
    Read("reward", ("combination",), lambda one: bool(one.reward.weights), "beside reward.weights"),
    Read(
        "reward",
        ("batch_epsilon",),
        lambda one: one.reward.rescale != "none" or one.reward.combination == "normalise-then-sum",
        "by reward.rescale and the combination 'normalise-then-sum'",
    ),
)
_OF_ADVANTAGES = (
    Read(
        "advantage",
        ("gamma", "masking"),
        _returns,
        f"by the estimators {', '.join(_RETURNS)}",
    ),
    Read(
        "advantage",
        ("reward_at",),
        lambda one: _returns(one) and one.advantage.reward_source == "sample",
        f"by the estimators {', '.join(_RETURNS)}, of the rewards of samples",
    ),
    Read(
        "advantage",
        ("lam_alpha",),
        lambda one: one.advantage.estimator == "gae",
        "by the estimator 'gae'",
    ),
    Read(
        "advantage",
        ("lam",),
        lambda one: one.advantage.estimator == "gae" and one.advantage.lam_alpha is None,
        "by the estimator 'gae' without advantage.lam_alpha",
    ),
    Read(
        "advantage",
        ("kl_masked",),
        lambda one: one.advantage.kl_in_reward and _returns(one),
        "where advantage.kl_in_reward is true, by estimators that sum up rewards",
    ),
    Read(
        "advantage",
        ("otb_zero_tail",),
        lambda one: one.advantage.estimator == "otb",
        "by the estimator 'otb'",
    ),
    Read(
        "advantage",
        ("whiten_scale", "whiten_short", "whiten_leave_one_out"),
        _whitens,
        "where advantage.whiten says so",
    ),
    Read(
        "advantage",
        ("returns",),
        lambda one: _whitens(one) and one.advantage.estimator in OF_NO_RETURNS,
        "where advantages that are whitened are all that the estimator gives",
    ),
    Read(
        "advantage",
        ("whiten_ddof", "whiten_epsilon", "whiten_form", "whiten_one_pass"),
        lambda one: _whitens(one) and one.advantage.whiten_scale,
        "where advantages are whitened to a deviation of 1",
    ),
)
_OF_KL = (
    Read(
        "kl",
        ("estimator", "value_clamp", "log_ratio_clamp"),
        _pays_kl,
        "where kl.coef is not 0",
    ),
    Read(
        "kl",
        ("policy_source",),
        lambda one: (
            _pays_kl(one) or one.advantage.estimator == "otb" or one.advantage.opd_coef != 0
        ),
        "where kl.coef is not 0, and of token baselines and distillation",
    ),
    Read(
        "kl",
        ("clamped",),
        lambda one: (
            _pays_kl(one) and (one.kl.value_clamp is not None or one.kl.log_ratio_clamp is not None)
        ),
        "beside kl.value_clamp and kl.log_ratio_clamp",
    ),
)
_OF_STAGES = {
    "reward.post_process": _OF_REWARDS,
    "advantage.kl": _OF_KL,
    "advantage.estimate": _OF_ADVANTAGES,
    "loss.policy": OF_LOSSES,
    "loss.value": OF_VALUES,
}


def not_read(stage: str, settings: Settings, columns: Collection[str] = ()) -> Iterator[str]:
    """What is stated of a stage and not read, a clause a field.

    A value that is the default, or that some profile fills in, is nobody's statement.

    Args:
        stage: The stage.
        settings: The arithmetic in force.
        columns: Columns that the capture holds: a mean of the entropy is recorded without a bonus.

    >>> from trajreplay.schema.settings import RewardSettings
    >>> odd = Settings(reward=RewardSettings(divide_by_std=False, divisor="baseline"))
    >>> list(not_read("reward.post_process", odd))
    ["reward.divisor is 'baseline', read only where rewards are divided by reward.divide_by_std"]
    """
    for one in _OF_STAGES.get(stage, ()):
        if one.where(settings):
            continue
        for name in one.fields:
            if name.startswith("entropy_") and "entropy" in columns:
                continue
            found = getattr(getattr(settings, one.section), name)
            if all(found != known for known in _filled(one.section, name)):
                yield f"{one.section}.{name} is {found!r}, read only {one.words}"


def _filled(section: str, name: str) -> Iterator[object]:
    yield getattr(SECTIONS[section](), name)
    for profile in PROFILES.values():
        yield getattr(getattr(profile.settings, section), name)

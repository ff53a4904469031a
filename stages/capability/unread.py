"""Settings that are stated and that nothing reads, since another one switches off what would.

They are no contradiction: what switches them off may be tried by hand, or be what a trainer sets
and ignores. But they are said, for whoever states them may mean to have them in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from trajreplay.schema.settings import PROFILES, SECTIONS, Settings
from trajreplay.stages.capability.losses import (
    means_over_micro_batches,
    means_over_samples,
    reads_old,
)


class _Read(NamedTuple):
    """When fields of a section are read.

    Args:
        section: The section.
        fields: Its fields.
        where: Whether they are read.
        words: The same in words, after "read only".
    """

    section: str
    fields: tuple[str, ...]
    where: Callable[[Settings], bool]
    words: str


def _scores(settings: Settings) -> bool:
    return settings.reward.rule == "normalise" and settings.reward.grouping != "none"


def _divides(settings: Settings) -> bool:
    return _scores(settings) and settings.reward.divide_by_std


def _deviates(settings: Settings) -> bool:
    return _divides(settings) and settings.reward.divisor != "baseline"


def _whitens(settings: Settings) -> bool:
    return settings.advantage.whiten != "none"


def _has_ratio(settings: Settings) -> bool:
    return settings.loss.surrogate != "reinforce"


_RETURNS = ("reinforce++", "gae", "remax", "otb")
_OF_REWARDS = (
    _Read("reward", ("baseline", "lone"), _scores, "where rewards are normalised"),
    _Read("reward", ("divisor",), _divides, "where rewards are divided by reward.divide_by_std"),
    _Read(
        "reward",
        ("std_grouping", "epsilon_place"),
        _deviates,
        "where rewards are divided by a deviation",
    ),
    _Read(
        "reward",
        ("ddof",),
        lambda one: _deviates(one) or one.reward.rescale != "none",
        "where rewards are divided by a deviation",
    ),
    _Read(
        "reward",
        ("epsilon",),
        lambda one: _deviates(one) or one.reward.rule == "gpg",
        "where rewards are divided by a deviation",
    ),
    _Read(
        "reward",
        ("missing",),
        lambda one: one.reward.grouping != "none" or bool(one.reward.weights),
        "where rewards are normalised or summed up",
    ),
    _Read(
        "reward",
        ("baseline_counts",),
        lambda one: one.reward.baseline == "length-weighted",
        "by the baseline 'length-weighted'",
    ),
    _Read(
        "reward",
        ("overlong_counts", "overlong_buffer", "overlong_penalty", "overlong_floored"),
        lambda one: one.reward.overlong_max_length is not None,
        "beside reward.overlong_max_length",
    ),
    _Read(
        "reward",
        ("stop_properly_rule",),
        lambda one: one.reward.stop_properly_coef is not None,
        "beside reward.stop_properly_coef",
    ),
    _Read(
        "reward",
        ("step_gamma",),
        lambda one: one.reward.unit == "step",
        "where reward.unit is 'step'",
    ),
    _Read(
        "reward", ("gpg_norm",), lambda one: one.reward.rule == "gpg", "where reward.rule is 'gpg'"
    ),
    _Read(
        "reward", ("combination",), lambda one: bool(one.reward.weights), "beside reward.weights"
    ),
    _Read(
        "reward",
        ("batch_epsilon",),
        lambda one: one.reward.rescale != "none" or one.reward.combination == "normalise-then-sum",
        "by reward.rescale and the combination 'normalise-then-sum'",
    ),
)
_OF_ADVANTAGES = (
    _Read(
        "advantage",
        ("gamma", "masking"),
        lambda one: one.advantage.estimator in _RETURNS,
        f"by the estimators {', '.join(_RETURNS)}",
    ),
    _Read(
        "advantage",
        ("lam", "lam_alpha"),
        lambda one: one.advantage.estimator == "gae",
        "by the estimator 'gae'",
    ),
    _Read(
        "advantage",
        ("kl_masked",),
        lambda one: one.advantage.kl_in_reward,
        "where advantage.kl_in_reward is true",
    ),
    _Read(
        "advantage",
        ("otb_zero_tail",),
        lambda one: one.advantage.estimator == "otb",
        "by the estimator 'otb'",
    ),
    _Read(
        "advantage",
        ("whiten_scale", "whiten_short", "whiten_leave_one_out"),
        _whitens,
        "where advantage.whiten says so",
    ),
    _Read(
        "advantage",
        ("whiten_ddof", "whiten_epsilon", "whiten_form", "whiten_one_pass"),
        lambda one: _whitens(one) and one.advantage.whiten_scale,
        "where advantages are whitened to a deviation of 1",
    ),
)
_OF_SURROGATES = tuple(
    _Read(
        "loss",
        fields,
        lambda one, surrogate=surrogate: one.loss.surrogate == surrogate,  # type: ignore[misc]
        f"by the surrogate {surrogate!r}",
    )
    for surrogate, fields in {
        "cispo": ("cispo_bounds",),
        "sapo": ("sapo_tau_pos", "sapo_tau_neg", "sapo_clipped"),
        "vespo": ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        "m2po": ("m2po_kl2_budget", "m2po_counts", "m2po_least_low", "m2po_least_high"),
        "kl-cov": ("kl_cov_fraction", "kl_cov_coef", "kl_cov_ppo_kl"),
        "dppo": ("dppo_measure", "dppo_rule", "dppo_form", "dppo_adv_tau", "dppo_kl_tau"),
        "dro": ("dro_beta",),
    }.items()
)
_OF_LOSSES = (
    *_OF_SURROGATES,
    _Read(
        "loss",
        ("ratio",),
        lambda one: _has_ratio(one) or one.loss.ratio == "one",
        "by surrogates that have a ratio",
    ),
    _Read(
        "loss",
        ("old_source",),
        lambda one: _has_ratio(one) or one.loss.opsm_delta is not None,
        "by surrogates that have a ratio",
    ),
    _Read(
        "loss",
        ("proximal",),
        lambda one: reads_old(one.loss),
        "where old log-probs are: in a ratio, weights, rejections",
    ),
    _Read(
        "loss", ("dual_side",), lambda one: one.loss.dual_clip is not None, "beside loss.dual_clip"
    ),
    _Read(
        "loss",
        ("correction_bounds", "correction_criterion"),
        lambda one: one.loss.correction != "none",
        "beside loss.correction",
    ),
    _Read(
        "loss",
        ("correction_norm_over",),
        lambda one: one.loss.correction_norm != "none",
        "beside loss.correction_norm",
    ),
    _Read(
        "loss",
        ("rejection_reverse", "rejection_log_clamp"),
        lambda one: bool(one.loss.rejection),
        "beside loss.rejection",
    ),
    _Read(
        "loss",
        ("opsm_source",),
        lambda one: one.loss.opsm_delta is not None,
        "beside loss.opsm_delta",
    ),
    _Read(
        "loss",
        ("kl_loss_weighted",),
        lambda one: one.loss.kl_loss_coef != 0,
        "where loss.kl_loss_coef is not 0",
    ),
    _Read(
        "loss",
        ("kl_loss_weight",),
        lambda one: one.loss.kl_loss_weighted,
        "where loss.kl_loss_weighted is true",
    ),
    _Read(
        "loss",
        ("constant_norm",),
        lambda one: "constant-norm" in (one.loss.aggregation, one.value.aggregation),
        "by the aggregation 'constant-norm'",
    ),
    _Read("loss", ("denominator_rows",), means_over_samples, "by means over samples"),
    _Read("loss", ("micro_batch_weight",), means_over_micro_batches, "by means over micro-batches"),
)
_OF_STAGES = {
    "reward.post_process": _OF_REWARDS,
    "advantage.estimate": _OF_ADVANTAGES,
    "loss.policy": _OF_LOSSES,
}


def not_read(stage: str, settings: Settings) -> Iterator[str]:
    """What is stated of a stage and not read, a clause a field.

    A value that is the default, or that some profile fills in, is nobody's statement.

    >>> from trajreplay.schema.settings import RewardSettings
    >>> odd = Settings(reward=RewardSettings(divide_by_std=False, divisor="baseline"))
    >>> list(not_read("reward.post_process", odd))
    ["reward.divisor is 'baseline', read only where rewards are divided by reward.divide_by_std"]
    """
    for one in _OF_STAGES.get(stage, ()):
        if one.where(settings):
            continue
        for name in one.fields:
            found = getattr(getattr(settings, one.section), name)
            if all(found != known for known in _filled(one.section, name)):
                yield f"{one.section}.{name} is {found!r}, read only {one.words}"


def _filled(section: str, name: str) -> Iterator[object]:
    yield getattr(SECTIONS[section](), name)
    for profile in PROFILES.values():
        yield getattr(getattr(profile.settings, section), name)

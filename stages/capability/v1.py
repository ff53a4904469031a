"""The V1 matrix, frozen: which stages a V1 contract can have recomputed."""

from __future__ import annotations

from collections.abc import Collection

from trajreplay.schema.contracts import stage_named
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import LOSS_TERMS, SECTIONS, Settings
from trajreplay.schema.settings.knobs import kinds
from trajreplay.stages.capability.ability import LOG_PROB_SOURCES, Ability

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")
# The fields that V1 settings had; every other one has to be what it is where nobody sets it.
_FIELDS = {
    "reward": "grouping n_samples_per_prompt baseline divide_by_std ddof epsilon",
    "kl": "estimator coef policy_source value_clamp",
    "advantage": "estimator",
    "loss": "eps_clip eps_clip_high entropy_coef aggregation batch_reduction old_source "
    + " ".join(LOSS_TERMS),
}
_LATER = {
    section: tuple(name for name in kinds(SECTIONS[section]) if name not in names.split())
    for section, names in _FIELDS.items()
}

_PLAIN = Settings()


def ability(
    stage: str, settings: Settings, parallel: ParallelCoordinates, columns: Collection[str] = ()
) -> Ability:
    """Look a stage up in the V1 matrix.

    Args:
        stage: Name of the stage.
        settings: The arithmetic in force.
        parallel: Where a capturing rank stands.
        columns: Columns that the capture holds.

    >>> ability("advantage.kl", Settings(), ParallelCoordinates(context_size=2)).reason
    'context-parallel size is 2; V1 recomputes size 1'
    """
    reason = (
        _layout_reason(parallel, columns)
        or _estimator_reason(settings)
        or _reason(stage, settings)
        or _later_reason(stage, settings)
    )
    if reason:
        return Ability("unsupported", reason)
    return Ability("recompute", "", *_needs(stage, settings, columns))


def _layout_reason(parallel: ParallelCoordinates, columns: Collection[str]) -> str:
    if "context_size" in columns:
        return "rows say which context-parallel shard they are; V1 recomputes size 1"
    if parallel.context_size != 1:
        return f"context-parallel size is {parallel.context_size}; V1 recomputes size 1"
    return ""


def _estimator_reason(settings: Settings) -> str:
    found = settings.advantage.estimator
    return "" if found == "grpo" else f"advantage.estimator is {found!r}; V1 recomputes 'grpo'"


def _reason(stage: str, settings: Settings) -> str:
    checks: dict[str, list[tuple[str, object, tuple[object, ...]]]] = {
        "reward.post_process": [
            ("reward.grouping", settings.reward.grouping, ("group", "none")),
            ("reward.baseline", settings.reward.baseline, ("mean", "none")),
            ("reward.ddof", settings.reward.ddof, (0, 1)),
        ],
        "advantage.kl": [
            ("kl.estimator", settings.kl.estimator, KL_ESTIMATORS),
            ("kl.policy_source", settings.kl.policy_source, tuple(LOG_PROB_SOURCES)),
        ],
        "loss.policy": [
            ("loss.aggregation", settings.loss.aggregation, ("seq-mean-token-mean",)),
            ("loss.batch_reduction", settings.loss.batch_reduction, ("sum", "mean")),
            ("loss.old_source", settings.loss.old_source, tuple(LOG_PROB_SOURCES)),
            *((f"loss.{name}", getattr(settings.loss, name), (False, None)) for name in LOSS_TERMS),
        ],
    }
    if stage == "loss.value":
        return "loss.value is not part of V1"
    for name, found, allowed in checks.get(stage, ()):
        if found not in allowed:
            expected = " or ".join(repr(one) for one in allowed if one is not None)
            return f"{name} is {found!r}; V1 recomputes {expected}"
    return ""


def _later_reason(stage: str, settings: Settings) -> str:
    """Settings that V1 did not have must be as they are where nobody sets them."""
    for section in stage_named(stage).settings:
        for name, (found, plain) in _later(section, settings).items():
            return f"{section}.{name} is {found!r}; V1 recomputes {plain!r}"
    return ""


def is_plain(stage: str, settings: Settings) -> bool:
    """Whether the settings of a stage are such as V1 had: its kernels recompute it.

    Rewards without a baseline are not, and nor are those over a deviation alone: what a lone
    sample and a constant group score is `reward.lone`, of which V1 knew nothing.
    """
    reward = settings.reward
    scored = stage == "reward.post_process" and reward.grouping != "none"
    if scored and (reward.baseline != "mean" or (reward.divide_by_std and not reward.epsilon > 0)):
        return False
    return not (_estimator_reason(settings) or _reason(stage, settings)) and not any(
        _later(section, settings) for section in stage_named(stage).settings
    )


def _later(section: str, settings: Settings) -> dict[str, tuple[object, object]]:
    """Settings that V1 did not have and that are not as by default, with both values."""
    mine, plain = getattr(settings, section, None), getattr(_PLAIN, section, None)
    return {
        name: (getattr(mine, name), getattr(plain, name))
        for name in _LATER.get(section, ())
        if getattr(mine, name) != getattr(plain, name)
    }


def _needs(
    stage: str, settings: Settings, columns: Collection[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns that a supported stage reads, and the outputs that it is held against."""
    if stage == "reward.raw":
        return ("raw_reward",), ()
    if stage == "reward.post_process":
        grouped = ("group_id",) if settings.reward.grouping == "group" else ()
        return ("raw_reward", *grouped), ("reward",)
    if stage == "advantage.kl":
        if settings.kl.coef == 0:
            return (), ("kl",)
        return (LOG_PROB_SOURCES[settings.kl.policy_source], "ref_log_probs"), ("kl",)
    if stage == "advantage.estimate":
        return ("reward",), ("advantages", *(("returns",) if "returns" in columns else ()))
    if stage == "loss.policy":
        old = LOG_PROB_SOURCES[settings.loss.old_source]
        # Without a bonus the loss does not read the entropy, so a capture may leave it out.
        bare = settings.loss.entropy_coef == 0 and "entropy" not in columns
        entropy, metric = ((), ()) if bare else (("entropy",), ("entropy_loss",))
        scalars = ("loss", "pg_loss", *metric, "pg_clipfrac", "ppo_kl")
        return ("log_probs", old, "advantages", *entropy), scalars
    return (), ()

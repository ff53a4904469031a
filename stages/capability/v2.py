"""The V2 matrix: every name that the settings know, unless they contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import SECTIONS, Settings
from trajreplay.schema.settings.knobs import kinds
from trajreplay.stages.capability import advantages, losses, rewards
from trajreplay.stages.capability.ability import LOG_PROB_SOURCES, Ability, Needs
from trajreplay.stages.capability.batches import over_batches
from trajreplay.stages.capability.ranks import of_ranks, uneven, unpadded

# The settings that each stage reads, by section.
_SECTIONS = {
    "reward.post_process": ("reward",),
    "advantage.kl": ("kl",),
    "advantage.estimate": ("advantage",),
    "loss.policy": ("loss",),
    "loss.value": ("value", "loss"),
}


def ability(
    stage: str, settings: Settings, parallel: ParallelCoordinates, columns: Collection[str] = ()
) -> Ability:
    """Look a stage up in the V2 matrix; arguments as of V1's.

    >>> from trajreplay.schema.settings import RewardSettings
    >>> odd = Settings(reward=RewardSettings(grouping="stride"))
    >>> ability("reward.post_process", odd, ParallelCoordinates()).reason
    "reward.grouping is 'stride' and reward.n_samples_per_prompt is not stated"
    """
    if parallel.context_size != 1 and settings.layout.context == "unstated":
        reason = (
            f"context-parallel size is {parallel.context_size} and layout.context is not stated"
        )
        return Ability("unsupported", reason)
    if multiple := uneven(settings.layout, parallel.context_size):
        return Ability("unsupported", multiple)
    if named := of_ranks(stage, settings, parallel, columns):
        return Ability("unsupported", named)
    cut = parallel.context_size != 1 or "context_size" in columns
    if cut and (unsaid := unpadded(settings.layout, columns)):
        return Ability("unsupported", unsaid)
    if cut and stage == "loss.policy" and settings.loss.nll_coef:
        reason = "loss.nll_coef is stated, a mean over whole samples, of which ranks hold shards"
        return Ability("unsupported", reason)
    if stage.startswith("loss.") and (shown := losses.only_inspected(stage, settings, columns)):
        return Ability("inspect-only", shown)
    reason = next(_unknown(stage, settings), "") or next(_contradictions(stage, settings), "")
    if reason:
        return Ability("unsupported", reason)
    reads, writes = _NEEDS[stage](settings, columns) if stage in _NEEDS else ((), ())
    scores = not stage.startswith("loss.") and settings.reward.constant_groups == "drop"
    if scores and over_batches(stage, settings, Ability("recompute")):
        reads = tuple(dict.fromkeys((*reads, "raw_reward", "group_id")))
    whole = stage.startswith("loss.") and losses.takes_whole(stage, settings.loss)
    whole |= stage == "loss.value" and losses.value_takes_whole(settings)
    whole |= stage == "reward.post_process" and rewards.takes_whole(settings)
    whole |= stage == "advantage.estimate" and advantages.takes_whole(settings)
    return Ability("recompute", "", reads, writes, whole)


def _unknown(stage: str, settings: Settings) -> Iterator[str]:
    """Names that no kernel goes by."""
    for section in _SECTIONS.get(stage, ()):
        for name, kind in kinds(SECTIONS[section]).items():
            found = getattr(getattr(settings, section), name)
            if unknown := kind.unknown(found):
                known = ", ".join(map(repr, kind.known))
                verb = "is" if kind.what == "name" else "names"
                yield f"{section}.{name} {verb} {unknown[0]!r}; v2 recomputes {known}"


def _contradictions(stage: str, settings: Settings) -> Iterator[str]:
    checks = {
        "reward.post_process": rewards.reward_contradictions,
        "advantage.estimate": advantages.advantage_contradictions,
    }
    checks |= {"loss.policy": losses.loss_contradictions, "loss.value": losses.value_contradictions}
    if stage in checks:
        yield from checks[stage](settings)


def _kl_needs(settings: Settings, columns: Collection[str]) -> Needs:
    if settings.kl.coef == 0:
        return (), ("kl",)
    return (LOG_PROB_SOURCES[settings.kl.policy_source], "ref_log_probs"), ("kl",)


_NEEDS: dict[str, Callable[[Settings, Collection[str]], Needs]] = {
    "reward.raw": rewards.raw_needs,
    "reward.post_process": rewards.reward_needs,
    "advantage.kl": _kl_needs,
    "advantage.estimate": advantages.advantage_needs,
    "loss.policy": losses.policy_needs,
    "loss.value": losses.value_needs,
}

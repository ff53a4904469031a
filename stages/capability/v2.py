"""The V2 matrix: every name that the settings know, unless they contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import SECTIONS, Settings
from trajreplay.schema.settings.knobs import kinds
from trajreplay.stages.capability.ability import LOG_PROB_SOURCES, Ability, Needs
from trajreplay.stages.capability.losses import (
    loss_contradictions,
    only_inspected,
    policy_needs,
    takes_whole,
    value_contradictions,
    value_needs,
)

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
    if stage.startswith("loss.") and (shown := only_inspected(stage, settings.loss, columns)):
        return Ability("inspect-only", shown)
    reason = next(_unknown(stage, settings), "") or next(_contradictions(stage, settings), "")
    if reason:
        return Ability("unsupported", reason)
    reads, writes = _NEEDS[stage](settings, columns) if stage in _NEEDS else ((), ())
    return Ability("recompute", "", reads, writes, _takes_whole(stage, settings))


def _takes_whole(stage: str, settings: Settings) -> bool:
    """Whether samples of other groups enter the result of one."""
    reward, advantage = settings.reward, settings.advantage
    if stage == "reward.post_process":
        by_batch = reward.grouping not in ("group", "none") or reward.std_grouping == "batch"
        return by_batch or reward.unit == "trajectory"
    if stage == "advantage.estimate":
        return advantage.whiten != "none"
    return stage == "loss.policy" and takes_whole(settings.loss)


def _unknown(stage: str, settings: Settings) -> Iterator[str]:
    """Names that no kernel goes by."""
    for section in _SECTIONS.get(stage, ()):
        for name, kind in kinds(SECTIONS[section]).items():
            found = getattr(getattr(settings, section), name)
            if kind.known and found not in kind.known:
                known = ", ".join(map(repr, kind.known))
                yield f"{section}.{name} is {found!r}; v2 recomputes {known}"


def _contradictions(stage: str, settings: Settings) -> Iterator[str]:
    checks = {"reward.post_process": _of_rewards, "advantage.estimate": _of_advantages}
    checks |= {"loss.policy": loss_contradictions, "loss.value": value_contradictions}
    if stage in checks:
        yield from checks[stage](settings)


def _of_rewards(settings: Settings) -> Iterator[str]:
    reward = settings.reward
    if reward.grouping == "stride" and not reward.n_samples_per_prompt:
        yield "reward.grouping is 'stride' and reward.n_samples_per_prompt is not stated"
    if reward.divisor == "baseline" and reward.baseline == "none":
        yield "reward.divisor is 'baseline' and reward.baseline is 'none'"
    if reward.ddof not in (0, 1):
        yield f"reward.ddof is {reward.ddof}; v2 recomputes 0 or 1"
    if reward.epsilon < 0:
        yield f"reward.epsilon is {reward.epsilon:g}, expected 0 or more"
    for name in ("scale_from", "scale_to", "clip_before", "clip_after"):
        bounds = getattr(reward, name)
        if bounds is not None and (bounds[0] == bounds[1] or not _is_range(name, bounds)):
            yield f"reward.{name} is {bounds}, expected a lower and a higher bound"
    if (reward.scale_from is None) != (reward.scale_to is None):
        yield "of reward.scale_from and reward.scale_to only one is stated"
    if reward.overlong_max_length is not None and not reward.overlong_buffer:
        yield "reward.overlong_max_length is stated and reward.overlong_buffer is 0"


def _of_advantages(settings: Settings) -> Iterator[str]:
    advantage = settings.advantage
    if advantage.kl_in_reward and advantage.estimator == "grpo":
        yield (
            "advantage.kl_in_reward is true and advantage.estimator is 'grpo', which has no token "
            "rewards"
        )
    if advantage.estimator == "gae" and advantage.masking == "reset":
        yield "advantage.masking is 'reset' and advantage.estimator is 'gae', which has no resets"
    if advantage.lam_alpha is not None and advantage.lam_alpha <= 0:
        yield f"advantage.lam_alpha is {advantage.lam_alpha:g}, expected more than 0"
    if advantage.whiten != "none" and advantage.whiten_ddof not in (0, 1):
        yield f"advantage.whiten_ddof is {advantage.whiten_ddof}; v2 recomputes 0 or 1"
    if advantage.kl_in_reward and settings.kl.coef == 0:
        yield "advantage.kl_in_reward is true and kl.coef is 0"


def _is_range(name: str, bounds: tuple[float, float]) -> bool:
    """Whether an interval can be clipped to or, of a scale, mapped."""
    inside = bounds[0] < float("inf") and bounds[1] > float("-inf")
    return inside and (not name.startswith("scale") or all(abs(one) < 1e38 for one in bounds))


def _reward_needs(settings: Settings, columns: Collection[str]) -> Needs:
    reward = settings.reward
    by = {"group": ("group_id",), "consumer-batch": ("consumer_batch_id",)}
    cut = ("truncated",) if reward.stop_properly_coef is not None else ()
    whole = ("trajectory_id",) if reward.unit == "trajectory" else ()
    return ("raw_reward", *by.get(reward.grouping, ()), *cut, *whole), ("reward",)


def _kl_needs(settings: Settings, columns: Collection[str]) -> Needs:
    if settings.kl.coef == 0:
        return (), ("kl",)
    return (LOG_PROB_SOURCES[settings.kl.policy_source], "ref_log_probs"), ("kl",)


def _advantage_needs(settings: Settings, columns: Collection[str]) -> Needs:
    reads = ["reward"]
    if settings.advantage.kl_in_reward:
        reads.append("kl")
    if settings.advantage.estimator == "gae":
        reads.append(critic_column(columns))
    return tuple(reads), ("advantages", *(("returns",) if "returns" in columns else ()))


def critic_column(columns: Collection[str]) -> str:
    """The critic's values before the update: what GAE was made of."""
    return "old_values" if "old_values" in columns else "values"


_NEEDS: dict[str, Callable[[Settings, Collection[str]], Needs]] = {
    "reward.raw": lambda settings, columns: (("raw_reward",), ()),
    "reward.post_process": _reward_needs,
    "advantage.kl": _kl_needs,
    "advantage.estimate": _advantage_needs,
    "loss.policy": policy_needs,
    "loss.value": value_needs,
}

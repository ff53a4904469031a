"""What the V2 matrix says of rewards: what contradicts itself, and what they read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from trajreplay.schema.settings import KL_ESTIMATORS, Settings
from trajreplay.stages.capability.ability import LOG_PROB_SOURCES, Needs
from trajreplay.stages.capability.rejections import rejected

# What other reward settings may be where a rule, or components, are normalised in their own way.
_GROUPINGS = ("group", "batch", "consumer-batch", "stride", "agent")
_WITH_RULES: dict[str, tuple[object, ...]] = {
    "grouping": _GROUPINGS,
    "combination": ("sum-then-normalise",),
    "baseline": ("mean",),
    "divisor": ("std",),
    "std_grouping": ("same",),
    "epsilon_place": ("added",),
    "missing": ("keep",),
}
_WITH_PARTS: dict[str, tuple[object, ...]] = {
    "unit": ("sample", "trajectory"),
    "grouping": _GROUPINGS,
    "baseline": ("mean", "none", "leave-one-out"),
    "std_grouping": ("same",),
    "epsilon_place": ("added",),
    "clip_before": (None,),
    "overlong_max_length": (None,),
    "stop_properly_coef": (None,),
    "bias": (0.0,),
    "factor": (1.0,),
    "costs": ({},),
    "less_kl": (False,),
    "rescale": ("none",),
}
# What a baseline that belongs to no group goes with.
_WITH_KEPT: dict[str, tuple[object, ...]] = {
    "grouping": ("none",),
    "divide_by_std": (False,),
    "unit": ("sample", "trajectory"),
    "rescale": ("none",),
}


def reward_contradictions(settings: Settings) -> Iterator[str]:
    """Why rewards cannot be processed as stated."""
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
    if counts_kept(settings):
        yield from rejected("reward.baseline_counts", settings)
        if settings.loss.m2_threshold is not None:
            yield "reward.baseline_counts are 'kept' and loss.m2_threshold is stated"
    if reward.overlong_max_length is not None and not reward.overlong_buffer:
        yield "reward.overlong_max_length is stated and reward.overlong_buffer is 0"
    if _counts_first(settings) and reward.unit != "sample":
        yield f"reward.overlong_counts is 'first-message' and reward.unit is {reward.unit!r}"
    yield from _of_rules(settings)


def _of_rules(settings: Settings) -> Iterator[str]:
    reward = settings.reward
    if reward.unit == "trajectory" and reward.grouping == "stride":
        yield "reward.unit is 'trajectory' and reward.grouping is 'stride', which counts rows"
    if reward.unit == "step" and reward.grouping != "group":
        yield f"reward.unit is 'step' and reward.grouping is {reward.grouping!r}"
    if reward.baseline == "greedy" and reward.grouping == "none":
        yield "reward.baseline is 'greedy' and reward.grouping is 'none'"
    yield from _of_members(settings)
    if reward.rule != "normalise":
        yield from _beside(settings, f"reward.rule is {reward.rule!r}", _WITH_RULES)
    if reward.combination == "normalise-then-sum":
        if len(reward.weights) < 2:
            yield (
                f"reward.combination is 'normalise-then-sum' and reward.weights has "
                f"{len(reward.weights)} components, expected two or more"
            )
        yield from _beside(settings, "reward.combination is 'normalise-then-sum'", _WITH_PARTS)
    yield from _of_trl(settings)
    if reward.batch_epsilon is not None and reward.batch_epsilon < 0:
        yield f"reward.batch_epsilon is {reward.batch_epsilon:g}, expected 0 or more"


def _of_trl(settings: Settings) -> Iterator[str]:
    """What a KL within the reward and a second normalisation do not go with."""
    reward, kl = settings.reward, settings.kl
    if reward.less_kl:
        if kl.coef == 0:
            yield "reward.less_kl is true and kl.coef is 0"
        if settings.advantage.kl_in_reward:
            yield "reward.less_kl and advantage.kl_in_reward are true, which pays the KL twice"
        if reward.unit == "step":
            yield "reward.less_kl is true and reward.unit is 'step'"
        for name, known in (
            ("policy_source", tuple(LOG_PROB_SOURCES)),
            ("estimator", KL_ESTIMATORS),
        ):
            if getattr(kl, name) not in known:
                expected = ", ".join(map(repr, known))
                yield f"kl.{name} is {getattr(kl, name)!r}; v2 recomputes {expected}"
    if reward.rescale != "none":
        if reward.batch_epsilon is None:
            yield "reward.rescale is 'batch' and reward.batch_epsilon is not stated"
        if reward.grouping == "none":
            yield "reward.rescale is 'batch' and reward.grouping is 'none'"


def _of_members(settings: Settings) -> Iterator[str]:
    """What groups of agents, kept baselines, costs and token rewards do not go with."""
    reward = settings.reward
    if reward.baseline == "kept":
        yield from _beside(settings, "reward.baseline is 'kept'", _WITH_KEPT)
    if reward.episode_agents and reward.grouping != "agent":
        yield f"reward.episode_agents are named and reward.grouping is {reward.grouping!r}"
    if reward.source == "token" and reward.weights:
        yield "reward.source is 'token' and reward.weights has components"
    if reward.costs and reward.grouping == "none":
        yield "reward.costs are named and reward.grouping is 'none'"
    if reward.missing == "exclude" and (reward.costs or reward.unit == "step"):
        other = "reward.costs are named" if reward.costs else "reward.unit is 'step'"
        yield f"{other} and reward.missing is 'exclude': a sum with a missing reward is not defined"
    if reward.gpg_norm <= 0:
        yield f"reward.gpg_norm is {reward.gpg_norm:g}, expected more than 0"
    if reward.std_grouping == "group" and reward.unit == "step":
        yield "reward.std_grouping is 'group' and reward.unit is 'step'"


def _beside(
    settings: Settings, what: str, allowed: Mapping[str, tuple[object, ...]]
) -> Iterator[str]:
    """Reward settings that say something else than a rule has of its own."""
    for name, values in allowed.items():
        found = getattr(settings.reward, name)
        if found not in values:
            expected = " or ".join("none" if one is None else repr(one) for one in values)
            yield f"{what} and reward.{name} is {found!r}, expected {expected}"


def _is_range(name: str, bounds: tuple[float, float]) -> bool:
    """Whether an interval can be clipped to or, of a scale, mapped."""
    inside = bounds[0] < float("inf") and bounds[1] > float("-inf")
    return inside and (not name.startswith("scale") or all(abs(one) < 1e38 for one in bounds))


def takes_whole(settings: Settings) -> bool:
    """Whether samples of other groups enter the processed reward of one."""
    reward = settings.reward
    by_batch = reward.grouping not in ("group", "agent", "none")
    by_batch |= reward.std_grouping == "batch"
    by_batch |= reward.combination == "normalise-then-sum" or reward.rule == "gpg"
    by_batch |= reward.rescale != "none"
    return by_batch or reward.unit != "sample"


def reward_needs(settings: Settings, columns: Collection[str]) -> Needs:
    """What reward.post_process reads and writes."""
    reward = settings.reward
    reads = ["reward_components" if reward.weights else raw_column(settings)]
    by_group = reward.grouping in ("group", "agent") or reward.std_grouping == "group"
    if by_group or counts_groups(settings):
        reads.append("group_id")
    asked = (
        ("consumer_batch_id", reward.grouping == "consumer-batch"),
        ("truncated", reward.stop_properly_coef is not None),
        ("trajectory_id", reward.unit != "sample"),
        ("fragment_index", reward.unit == "step"),
        ("greedy_reward", reward.baseline == "greedy"),
        ("kept_baseline", reward.baseline == "kept"),
        ("agent_id", reward.grouping == "agent"),
        ("episode_id", bool(reward.episode_agents)),
        ("turns", "turns" in reward.costs),
        ("first_message_length", _counts_first(settings)),
        ("old_log_probs", counts_kept(settings)),
        ("rollout_log_probs", counts_kept(settings)),
        (LOG_PROB_SOURCES.get(settings.kl.policy_source, ""), reward.less_kl),
        ("ref_log_probs", reward.less_kl),
    )
    reads += dict.fromkeys(name for name, on in asked if on)
    return tuple(reads), ("reward",)


def _counts_first(settings: Settings) -> bool:
    """Whether an overlong penalty goes by the first message of the model."""
    reward = settings.reward
    return reward.overlong_max_length is not None and reward.overlong_counts == "first-message"


def counts_kept(settings: Settings) -> bool:
    """Whether a baseline is weighted by the tokens that the loss keeps."""
    reward = settings.reward
    weighted = reward.baseline == "length-weighted" and reward.rule == "normalise"
    return weighted and reward.grouping != "none" and reward.baseline_counts == "kept"


def raw_column(settings: Settings) -> str:
    """What raw rewards of one piece are read from."""
    return "token_rewards" if settings.reward.source == "token" else "raw_reward"


def counts_groups(settings: Settings) -> bool:
    """Whether the members of groups are counted that are not those that are normalised over."""
    reward = settings.reward
    by_batch = reward.grouping in ("batch", "consumer-batch")
    return by_batch and reward.n_samples_per_prompt is not None


def raw_needs(settings: Settings, columns: Collection[str]) -> Needs:
    """What reward.raw reads and writes."""
    reward = settings.reward
    if not reward.weights and reward.source == "sample":
        return ("raw_reward",), ()
    # What the pieces are summed up to is held against them, where it is recorded.
    summed = reward.combination == "sum-then-normalise" and "raw_reward" in columns
    pieces = "reward_components" if reward.weights else "token_rewards"
    return (pieces, *(("raw_reward",) if summed else ())), ()

"""Processed rewards from raw ones, as the reward settings say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trajreplay.schema import RewardSettings, StageError
from trajreplay.stages.kernels.components import decoupled_rewards, summed_rewards
from trajreplay.stages.kernels.estimators import gpg_rewards, pass_at_k_rewards
from trajreplay.stages.kernels.normalise import normalise_rewards
from trajreplay.stages.kernels.penalties import cost_penalised_rewards
from trajreplay.stages.kernels.segments import scatter_sum, segment_sum
from trajreplay.stages.kernels.shaping import overlong_penalty, scale_rewards, truncation_rewards
from trajreplay.stages.kernels.step_returns import step_returns


@dataclass(frozen=True)
class RewardInputs:
    """What rewards are processed with, besides the raw ones.

    Args:
        group: (S,) int64. Which samples share a baseline.
        batch: (S,) int64. Which samples are of one cohort.
        lengths: (S,) int64. Response tokens.
        trained: (S,) float. Trainable ones.
        trajectory: (S,) int64. Which samples are fragments of one; None where each is its own.
        step: (S,) int64. The place of each fragment in its trajectory; None where none is asked.
        truncated: (S,) bool. Responses cut at the length limit; None where no setting asks.
        greedy: (S,) float. Rewards of the greedy responses; None where no setting asks.
        kept: (S,) float. Baselines that the trainer kept; None where no setting asks.
        prompt: (S,) int64. Which samples are of one prompt; None where that is `group`.
        totals: (S,) int64. Prompt and response tokens; None where no setting asks.
        turns: (S,) float. Turns of the model; None where no setting asks.
        penalty: (S,) float. What each pays for its KL; None where no setting asks.
    """

    group: Tensor
    batch: Tensor
    lengths: Tensor
    trained: Tensor
    trajectory: Tensor | None = None
    step: Tensor | None = None
    truncated: Tensor | None = None
    greedy: Tensor | None = None
    kept: Tensor | None = None
    prompt: Tensor | None = None
    totals: Tensor | None = None
    turns: Tensor | None = None
    penalty: Tensor | None = None


def summed_components(settings: RewardSettings, components: Tensor) -> Tensor:
    """(S,) The weighted sum of components, (S, K), in the order of the weights' names."""
    weights = torch.tensor(list(settings.weights.values()), dtype=torch.float64)
    return summed_rewards(components, weights, missing=settings.missing)


def summed_tokens(token_rewards: Tensor, offsets: Tensor) -> Tensor:
    """(S,) The sum of the token rewards of each sample, (N,), masked ones and all."""
    return segment_sum(token_rewards, offsets)


def processed_rewards(settings: RewardSettings, raw: Tensor, given: RewardInputs) -> Tensor:
    """Add up, scale, shape, clip, normalise and clip again.

    Args:
        settings: What is done.
        raw: (S,) float. Raw rewards; (S, K), their components, where the settings weigh some.
        given: What else it takes.

    Returns:
        (S,) in the dtype of `raw`.
    """
    if settings.unit == "trajectory" and given.trajectory is not None:
        return _by_trajectory(settings, raw, given, given.trajectory)
    summed = raw.dim() == 2 and settings.combination == "sum-then-normalise"
    rewards = summed_components(settings, raw) if summed else raw
    rewards = _shaped(settings, rewards, given)
    if settings.clip_before is not None:
        rewards = rewards.clamp(*settings.clip_before)
    if settings.less_kl:
        assert given.penalty is not None  # the capability matrix asks for it
        rewards = rewards - given.penalty.to(rewards.dtype)
    if settings.unit == "step" and given.trajectory is not None and given.step is not None:
        _numbered_trajectories(given.group, given.trajectory)
        rewards = step_returns(rewards, given.trajectory, given.step, gamma=settings.step_gamma)
        given = replace(given, group=_cells(given.group, given.step))
    if settings.costs:
        rewards = _less_costs(settings, rewards, given)
    if settings.baseline == "kept":
        assert given.kept is not None  # the capability matrix asks for them
        rewards = rewards - given.kept.to(rewards.dtype)
    elif settings.grouping != "none":
        rewards = _rescaled(settings, rewards, _scored(settings, rewards, given), given.batch)
    return rewards if settings.clip_after is None else rewards.clamp(*settings.clip_after)


def _scored(settings: RewardSettings, rewards: Tensor, given: RewardInputs) -> Tensor:
    """Each sample against its group."""
    if settings.rule == "gpg":
        return gpg_rewards(
            rewards,
            given.group,
            batch_index=given.batch,
            f_norm=settings.gpg_norm,
            lone=settings.lone,
        )
    if settings.rule == "pass@k":
        return pass_at_k_rewards(
            rewards,
            given.group,
            divide_by_std=settings.divide_by_std,
            ddof=settings.ddof,
            epsilon=settings.epsilon,
        )
    divisor = settings.divisor if settings.divide_by_std else "none"
    if rewards.dim() == 2:
        return decoupled_rewards(
            rewards,
            torch.tensor(list(settings.weights.values()), dtype=torch.float64),
            given.group,
            batch_index=given.batch,
            batch_epsilon=settings.batch_epsilon,
            missing=settings.missing,
            baseline=settings.baseline,
            divisor=divisor,
            ddof=settings.ddof,
            epsilon=settings.epsilon,
            lone=settings.lone,
        )
    return normalise_rewards(
        rewards,
        given.group,
        baseline=settings.baseline,
        divisor=divisor,
        divisor_index={"batch": given.batch, "group": given.prompt}.get(settings.std_grouping),
        ddof=settings.ddof,
        epsilon=settings.epsilon,
        epsilon_place=settings.epsilon_place,
        lone=settings.lone,
        missing=settings.missing,
        lengths=given.lengths if settings.baseline_counts == "response" else given.trained,
        greedy_rewards=given.greedy,
    )


def _rescaled(settings: RewardSettings, raw: Tensor, scored: Tensor, batch: Tensor) -> Tensor:
    """What was scored, normalised again over its batch where the settings say so."""
    if settings.rescale == "none":
        return scored
    assert settings.batch_epsilon is not None  # the capability matrix asks for it
    if settings.missing == "exclude":  # what has no score is no 0 among the others
        scored = torch.where(raw.isnan(), torch.nan, scored)
    return normalise_rewards(
        scored,
        batch,
        divisor="std",
        ddof=settings.ddof,
        epsilon=settings.batch_epsilon,
        missing=settings.missing,
    )


def _by_trajectory(
    settings: RewardSettings, raw: Tensor, given: RewardInputs, trajectory: Tensor
) -> Tensor:
    """Process the reward of each trajectory once, and give it to all of its fragments."""
    member, first = _numbered_trajectories(given.group, trajectory)
    count = len(first)
    odd = (raw != raw[first][member]) & ~(raw.isnan() & raw[first][member].isnan())
    if bool(odd.any()):
        fragments = int(odd.reshape(len(raw), -1).any(1).sum())
        raise StageError(
            f"{fragments} fragments have another raw reward than the first of their "
            "trajectory, expected one reward a trajectory",
            hint="State reward.unit sample if each fragment is scored by itself.",
        )
    truncated = None
    if given.truncated is not None:
        truncated = scatter_sum(given.truncated.double(), member, count) > 0
    one = RewardInputs(
        given.group[first],
        given.batch[first],
        scatter_sum(given.lengths.double(), member, count),
        scatter_sum(given.trained.double(), member, count),
        truncated=truncated,
        greedy=None if given.greedy is None else given.greedy[first],
        kept=None if given.kept is None else given.kept[first],
        prompt=None if given.prompt is None else given.prompt[first],
        totals=None if given.totals is None else scatter_sum(given.totals.double(), member, count),
        turns=None if given.turns is None else scatter_sum(given.turns, member, count),
        penalty=None if given.penalty is None else scatter_sum(given.penalty, member, count),
    )
    return processed_rewards(settings, raw[first], one)[member]


def _numbered_trajectories(group: Tensor, trajectory: Tensor) -> tuple[Tensor, Tensor]:
    """Number trajectories from 0: that of each fragment, and the first fragment of each.

    Raises:
        StageError: One has fragments in several groups: no statistic is of the whole of it.
    """
    _, member = torch.unique(trajectory, return_inverse=True)
    count = int(member.max()) + 1 if len(member) else 0
    place = torch.arange(len(member))
    first = torch.full((count,), len(member)).scatter_reduce(0, member, place, "amin")
    apart = member[group != group[first][member]].unique().numel()
    if apart:
        raise StageError(
            f"{apart} of {count} trajectories have fragments in several groups, expected each in "
            "one",
            hint="Give all fragments of a trajectory the group of its prompt.",
        )
    return member, first


def _cells(group: Tensor, step: Tensor) -> Tensor:
    """Groups divided by the step of each sample."""
    _, place = torch.unique(step, return_inverse=True)
    cells: Tensor = group * (int(place.max()) + 1 if len(place) else 1) + place
    return cells


def _shaped(settings: RewardSettings, rewards: Tensor, given: RewardInputs) -> Tensor:
    if settings.scale_from is not None and settings.scale_to is not None:
        source, target = settings.scale_from, settings.scale_to
        scaled = scale_rewards(rewards.flatten(), source=source, target=target)
        rewards = scaled.reshape(rewards.shape)
    if settings.stop_properly_coef is not None and given.truncated is not None:
        rewards = truncation_rewards(
            rewards,
            given.truncated,
            coefficient=settings.stop_properly_coef,
            rule=settings.stop_properly_rule,
        )
    if settings.overlong_max_length is not None:
        penalty = overlong_penalty(
            given.lengths if settings.overlong_counts == "response" else given.trained,
            max_length=settings.overlong_max_length,
            buffer=settings.overlong_buffer,
            penalty=settings.overlong_penalty,
            floored=settings.overlong_floored,
        )
        rewards = rewards + penalty.to(rewards.dtype)
    if settings.bias or settings.factor != 1.0:
        rewards = (rewards + settings.bias) * settings.factor
    return rewards


def _less_costs(settings: RewardSettings, rewards: Tensor, given: RewardInputs) -> Tensor:
    known: dict[str, Callable[[], Tensor | None]] = {
        "output": lambda: given.trained,
        "input": lambda: None if given.totals is None else given.totals - given.trained,
        "turns": lambda: given.turns,
    }
    costs = [known[name]() for name in settings.costs]
    there = [one.to(rewards.dtype) for one in costs if one is not None]
    weights = tuple(settings.costs.values())
    return cost_penalised_rewards(rewards, torch.stack(there, 1), given.group, weights=weights)

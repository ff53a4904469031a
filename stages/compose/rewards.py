"""Processed rewards from raw ones, as the reward settings say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.schema import RewardSettings, StageError
from trajreplay.stages.kernels import scatter_sum
from trajreplay.stages.kernels.normalise import normalise_rewards
from trajreplay.stages.kernels.shaping import overlong_penalty, scale_rewards, truncation_rewards


@dataclass(frozen=True)
class RewardInputs:
    """What rewards are processed with, besides the raw ones.

    Args:
        group: (S,) int64. Which samples share a baseline.
        batch: (S,) int64. Which samples are of one cohort.
        lengths: (S,) int64. Response tokens.
        trained: (S,) float. Trainable ones.
        trajectory: (S,) int64. Which samples are fragments of one; None where each is its own.
        truncated: (S,) bool. Responses cut at the length limit; None where no setting asks.
    """

    group: Tensor
    batch: Tensor
    lengths: Tensor
    trained: Tensor
    trajectory: Tensor | None = None
    truncated: Tensor | None = None


def processed_rewards(settings: RewardSettings, raw: Tensor, given: RewardInputs) -> Tensor:
    """Scale, shape, clip, normalise and clip again.

    Args:
        settings: What is done.
        raw: (S,) float. Raw rewards.
        given: What else it takes.

    Returns:
        (S,) in the dtype of `raw`.
    """
    if settings.unit == "trajectory" and given.trajectory is not None:
        return _by_trajectory(settings, raw, given, given.trajectory)
    rewards = _shaped(settings, raw, given)
    if settings.clip_before is not None:
        rewards = rewards.clamp(*settings.clip_before)
    if settings.grouping != "none":
        rewards = normalise_rewards(
            rewards,
            given.group,
            baseline=settings.baseline,
            divisor=settings.divisor if settings.divide_by_std else "none",
            divisor_index=given.batch if settings.std_grouping == "batch" else None,
            ddof=settings.ddof,
            epsilon=settings.epsilon,
            epsilon_place=settings.epsilon_place,
            lone=settings.lone,
            missing=settings.missing,
            lengths=given.lengths,
        )
    return rewards if settings.clip_after is None else rewards.clamp(*settings.clip_after)


def _by_trajectory(
    settings: RewardSettings, raw: Tensor, given: RewardInputs, trajectory: Tensor
) -> Tensor:
    """Process the reward of each trajectory once, and give it to all of its fragments."""
    _, member = torch.unique(trajectory, return_inverse=True)
    count = int(member.max()) + 1 if len(member) else 0
    first = torch.full((count,), len(raw)).scatter_reduce(0, member, torch.arange(len(raw)), "amin")
    odd = (raw != raw[first][member]) & ~(raw.isnan() & raw[first][member].isnan())
    if bool(odd.any()):
        raise StageError(
            f"{int(odd.sum())} fragments have another raw reward than the first of their "
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
    )
    return processed_rewards(settings, raw[first], one)[member]


def _shaped(settings: RewardSettings, rewards: Tensor, given: RewardInputs) -> Tensor:
    if settings.scale_from is not None and settings.scale_to is not None:
        rewards = scale_rewards(rewards, source=settings.scale_from, target=settings.scale_to)
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
    return rewards

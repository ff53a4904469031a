"""Processed rewards from raw ones, as the reward settings say."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trajreplay.schema import RewardSettings, StageError
from trajreplay.stages.compose import calls
from trajreplay.stages.compose.reward_inputs import (
    RewardInputs,
    cells,
    costs_of,
    numbered_trajectories,
    of_trajectories,
)
from trajreplay.stages.kernels.components import decoupled_rewards, summed_rewards
from trajreplay.stages.kernels.estimators import gpg_rewards, pass_at_k_rewards
from trajreplay.stages.kernels.groups import constant_groups
from trajreplay.stages.kernels.normalise import normalise_rewards
from trajreplay.stages.kernels.penalties import cost_penalised_rewards
from trajreplay.stages.kernels.segments import segment_sum
from trajreplay.stages.kernels.shaping import overlong_penalty, scale_rewards, truncation_rewards
from trajreplay.stages.kernels.step_returns import step_returns


def summed_components(settings: RewardSettings, components: Tensor) -> Tensor:
    """(S,) The weighted sum of components, (S, K), in the order of the weights' names."""
    weights = calls.component_weights(settings)
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
    rewards, given = _entering(settings, raw, given)
    if settings.baseline == "kept":
        assert given.kept is not None  # the capability matrix asks for them
        rewards = rewards - given.kept.to(rewards.dtype)
    elif settings.grouping != "none":
        rewards = _rescaled(settings, rewards, _scored(settings, rewards, given), given)
    return rewards if settings.clip_after is None else rewards.clamp(*settings.clip_after)


def equal_rewards(settings: RewardSettings, raw: Tensor, given: RewardInputs) -> Tensor:
    """(S,) bool. Samples that are divided by the deviation of rewards, or components, all equal."""
    if settings.unit == "trajectory" and given.trajectory is not None:
        one, first, member = of_trajectories(given, given.trajectory)
        return equal_rewards(replace(settings, unit="sample"), raw[first], one)[member]
    none = torch.zeros(len(raw), dtype=torch.bool)
    deviation = settings.divide_by_std and settings.divisor != "baseline"
    if settings.grouping == "none" or settings.rule != "normalise" or not deviation:
        return none
    rewards, given = _entering(settings, raw, given)
    shared = calls.divisor_index(settings, given)
    index = given.group if shared is None else shared
    for component in rewards.reshape(len(raw), -1).unbind(1):
        none = none | constant_groups(component, index)
    return none


def _entering(
    settings: RewardSettings, raw: Tensor, given: RewardInputs
) -> tuple[Tensor, RewardInputs]:
    """What is scored, and with what."""
    summed = raw.dim() == 2 and settings.combination == "sum-then-normalise"
    rewards = summed_components(settings, raw) if summed else raw
    rewards = _shaped(settings, rewards, given)
    if settings.clip_before is not None:
        rewards = rewards.clamp(*settings.clip_before)
    if settings.less_kl:
        assert given.penalty is not None  # the capability matrix asks for it
        rewards = rewards - given.penalty.to(rewards.dtype)
    if settings.unit == "step" and given.trajectory is not None and given.step is not None:
        numbered_trajectories(given.group, given.trajectory)
        rewards = step_returns(rewards, given.trajectory, given.step, gamma=settings.step_gamma)
        given = replace(given, group=cells(given.group, given.step))
    if settings.costs:
        rewards = _less_costs(settings, rewards, given)
    return rewards, given


def _scored(settings: RewardSettings, rewards: Tensor, given: RewardInputs) -> Tensor:
    """Each sample against its group."""
    if settings.rule == "gpg":
        return gpg_rewards(rewards, **calls.gpg(settings, given))
    if settings.rule == "pass@k":
        return pass_at_k_rewards(rewards, **calls.pass_at_k(settings, given))
    if rewards.dim() == 2:
        return decoupled_rewards(rewards, **calls.decoupled(settings, given))
    return normalise_rewards(rewards, **calls.normalised(settings, given))


def _rescaled(settings: RewardSettings, raw: Tensor, scored: Tensor, given: RewardInputs) -> Tensor:
    """What was scored, normalised again over its batch where the settings say so."""
    if settings.rescale == "none":
        return scored
    if settings.missing == "exclude":  # what has no score is no 0 among the others
        scored = torch.where(raw.isnan(), torch.nan, scored)
    return normalise_rewards(scored, **calls.rescaled(settings, given))


def _by_trajectory(
    settings: RewardSettings, raw: Tensor, given: RewardInputs, trajectory: Tensor
) -> Tensor:
    """Process the reward of each trajectory once, and give it to all of its fragments."""
    one, first, member = of_trajectories(given, trajectory)
    odd = (raw != raw[first][member]) & ~(raw.isnan() & raw[first][member].isnan())
    if bool(odd.any()):
        fragments = int(odd.reshape(len(raw), -1).any(1).sum())
        raise StageError(
            f"{fragments} fragments have another raw reward than the first of their "
            "trajectory, expected one reward a trajectory",
            hint="State reward.unit sample if each fragment is scored by itself.",
        )
    return processed_rewards(settings, raw[first], one)[member]


def _shaped(settings: RewardSettings, rewards: Tensor, given: RewardInputs) -> Tensor:
    """Scaled, less what it is too long, and then what it gets that did not stop (OpenRLHF)."""
    if settings.scale_from is not None and settings.scale_to is not None:
        source, target = settings.scale_from, settings.scale_to
        scaled = scale_rewards(rewards.flatten(), source=source, target=target)
        rewards = scaled.reshape(rewards.shape)
    if settings.overlong_max_length is not None:
        penalty = overlong_penalty(**calls.overlong(settings, given))
        rewards = rewards + penalty.to(rewards.dtype)
    if settings.stop_properly_coef is not None and given.truncated is not None:
        rewards = truncation_rewards(
            rewards,
            given.truncated,
            coefficient=settings.stop_properly_coef,
            rule=settings.stop_properly_rule,
        )
    if settings.bias or settings.factor != 1.0:
        rewards = (rewards + settings.bias) * settings.factor
    return rewards


def _less_costs(settings: RewardSettings, rewards: Tensor, given: RewardInputs) -> Tensor:
    there = [one.to(rewards.dtype) for one in costs_of(settings, given)]
    weights = tuple(settings.costs.values())
    return cost_penalised_rewards(rewards, torch.stack(there, 1), given.group, weights=weights)

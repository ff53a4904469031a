"""What float32 may change of processed rewards, whatever the settings."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from trajreplay.schema import RewardSettings
from trajreplay.stages.compose import calls
from trajreplay.stages.compose.reward_inputs import (
    RewardInputs,
    cells,
    costs_of,
    numbered_trajectories,
    of_trajectories,
)
from trajreplay.stages.compose.rewards import processed_rewards, summed_components
from trajreplay.stages.kernels import estimator_errors
from trajreplay.stages.kernels.groups import groups_of
from trajreplay.stages.kernels.normalise_error import normalised
from trajreplay.stages.kernels.precision import FLOAT32_ROUNDOFF, finite_or_nan
from trajreplay.stages.kernels.rounded import (
    Rounded,
    constant,
    exactly,
    in_float32,
    mean_error,
)
from trajreplay.stages.kernels.scan_error import step_returns_error
from trajreplay.stages.kernels.shaping import (
    overlong_penalty,
    scale_rewards,
)
from trajreplay.stages.kernels.step_returns import step_returns

U = FLOAT32_ROUNDOFF


def processed_rewards_error(
    settings: RewardSettings, raw: Tensor, given: RewardInputs, entry: Tensor | None = None
) -> Tensor:
    """Bound how far a float32 evaluation of `processed_rewards` may lie from the exact value.

    Args:
        settings: What is done.
        raw: As there.
        given: As there.
        entry: (S,) float64. What the raw rewards may be off by already; 0 if not given.

    Returns:
        (S,) float64, NaN where there is no bound. Unit of the result.

    Conventions:
        The trainer is taken to round raw rewards to float32, whose effect is computed and added,
        or to keep them. What follows is bounded operation by operation, as `normalised` says.
    """
    rounded = raw.float().double()
    exact = processed_rewards(settings, raw, given)
    effect = (processed_rewards(settings, rounded, given) - exact).abs()
    found = _processed(settings, _entered(rounded, entry), given)
    return finite_or_nan(effect.nan_to_num(nan=0.0) + found.error)


def summed_rewards_error(settings: RewardSettings, components: Tensor) -> Tensor:
    """(S,) The same of `summed_components`."""
    rounded = components.float().double()
    effect = summed_components(settings, rounded) - summed_components(settings, components)
    weights = calls.component_weights(settings)
    found = estimator_errors.summed(rounded, weights, missing=settings.missing)
    return effect.abs().nan_to_num(nan=0.0) + found.error.nan_to_num(nan=0.0)


def _entered(rounded: Tensor, entry: Tensor | None) -> Rounded:
    return exactly(rounded) if entry is None else Rounded(rounded, entry)


def _processed(settings: RewardSettings, raw: Rounded, given: RewardInputs) -> Rounded:
    if settings.unit == "trajectory" and given.trajectory is not None:
        one, first, member = of_trajectories(given, given.trajectory)
        return _processed(settings, raw[first], one)[member]
    rewards = raw
    if raw.value.dim() == 2 and settings.combination == "sum-then-normalise":
        weights = calls.component_weights(settings)
        rewards = estimator_errors.summed(raw.value, weights, missing=settings.missing)
    rewards = _shaped(settings, rewards, given)
    if settings.clip_before is not None:
        rewards = rewards.clamped(*settings.clip_before)
    if settings.less_kl:
        assert given.penalty is not None
        paid = given.penalty_error
        rewards = rewards - Rounded(
            given.penalty, torch.zeros_like(given.penalty) if paid is None else paid
        )
    if settings.unit == "step" and given.trajectory is not None and given.step is not None:
        numbered_trajectories(given.group, given.trajectory)
        places, gamma = (given.trajectory, given.step), settings.step_gamma
        rewards = Rounded(
            step_returns(rewards.value, *places, gamma=gamma),
            step_returns_error(rewards, *places, gamma=gamma),
        )
        given = replace(given, group=cells(given.group, given.step))
    if settings.costs:
        rewards = _less_costs(settings, rewards, given)
    if settings.baseline == "kept":
        assert given.kept is not None
        rewards = rewards - in_float32(given.kept)
    elif settings.grouping != "none":
        rewards = _rescaled(settings, rewards, _scored(settings, rewards, given), given)
    return rewards if settings.clip_after is None else rewards.clamped(*settings.clip_after)


def _shaped(settings: RewardSettings, rewards: Rounded, given: RewardInputs) -> Rounded:
    """Scaled, lengthy and cut rewards: what each operation of one form rounds, and once more."""
    if settings.scale_from is not None and settings.scale_to is not None:
        source, target = settings.scale_from, settings.scale_to
        flat = rewards.value.flatten()
        value = scale_rewards(flat, source=source, target=target).reshape(rewards.value.shape)
        slope = abs((target[1] - target[0]) / (source[1] - source[0]))
        size = value.abs() + 2.0 * abs(target[0]) + slope * sum(map(abs, source))
        error = torch.where(in_float32(value).error == 0.0, 0.0, 6.0 * U * size)
        rewards = Rounded(value, slope * rewards.error + error)
    if settings.overlong_max_length is not None:
        value = overlong_penalty(**calls.overlong(settings, given)).double()
        error = torch.where(in_float32(value).error == 0.0, 0.0, 4.0 * U * value.abs())
        rewards = rewards + Rounded(value, error)
    if settings.stop_properly_coef is not None and given.truncated is not None:
        cut = given.truncated if rewards.value.dim() == 1 else given.truncated[:, None]
        ruled = constant(settings.stop_properly_coef)
        if settings.stop_properly_rule == "multiply":
            ruled = rewards * ruled
        else:
            zero = torch.zeros_like(rewards.value)
            ruled = Rounded(ruled.value + zero, ruled.error + zero)
        rewards = ruled.where(cut, rewards)
    if settings.bias or settings.factor != 1.0:
        rewards = (rewards + constant(settings.bias)) * constant(settings.factor)
    return rewards


def _less_costs(settings: RewardSettings, rewards: Rounded, given: RewardInputs) -> Rounded:
    groups = groups_of(given.group)
    mean = groups.mean(rewards.value)[groups.member]
    share = torch.zeros_like(rewards.value)
    for cost, weight in zip(costs_of(settings, given), settings.costs.values(), strict=True):
        largest = -groups.least(-cost.double())[groups.member]
        share += torch.where(largest == 0.0, 0.0, weight * cost.double() / largest)
    # Each share is a quotient, a product and a sum, and all of them a product and a difference.
    rounding = (3.0 * len(settings.costs) + 1.0) * U * share.abs()
    paid = Rounded(mean, mean_error(rewards, groups)[groups.member]) * Rounded(share, rounding)
    return rewards - paid


def _scored(settings: RewardSettings, rewards: Rounded, given: RewardInputs) -> Rounded:
    if settings.rule == "gpg":
        return estimator_errors.gpg(rewards, **calls.gpg(settings, given))
    if settings.rule == "pass@k":
        return estimator_errors.pass_at_k(rewards, **calls.pass_at_k(settings, given))
    if rewards.value.dim() == 2:
        return estimator_errors.decoupled(rewards, **calls.decoupled(settings, given))
    return normalised(rewards, **calls.normalised(settings, given))


def _rescaled(
    settings: RewardSettings, raw: Rounded, scored: Rounded, given: RewardInputs
) -> Rounded:
    if settings.rescale == "none":
        return scored
    if settings.missing == "exclude":
        value = torch.where(raw.value.isnan(), torch.nan, scored.value)
        scored = Rounded(value, scored.error)
    return normalised(scored, **calls.rescaled(settings, given))

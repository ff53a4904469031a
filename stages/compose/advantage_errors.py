"""What float32 may change of advantages and returns, whatever the settings."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.schema import AdvantageSettings
from trajreplay.stages.compose import calls
from trajreplay.stages.compose.advantage_inputs import AdvantageInputs
from trajreplay.stages.compose.advantages import Estimate
from trajreplay.stages.kernels.advantages import grpo_advantages
from trajreplay.stages.kernels.baseline_error import optimal_token_error
from trajreplay.stages.kernels.gae import gae_terms, length_adaptive_lambda
from trajreplay.stages.kernels.precision import FLOAT32_ROUNDOFF, finite_or_nan
from trajreplay.stages.kernels.returns import return_decay, token_rewards
from trajreplay.stages.kernels.rounded import Rounded, constant, exactly, in_float32
from trajreplay.stages.kernels.scan_error import ScanTerms, decay_error, scan_error
from trajreplay.stages.kernels.scans import per_token
from trajreplay.stages.kernels.whitening_error import whitened

U = FLOAT32_ROUNDOFF


def estimate_advantages_error(settings: AdvantageSettings, given: AdvantageInputs) -> Estimate:
    """Bound how far a float32 evaluation of `estimate_advantages` may lie from the exact value.

    Args:
        settings: What is done.
        given: What it is done with: as recorded, and so exact, but for rewards.

    Returns:
        (N,) float64 each, NaN where there is no bound.

    Conventions:
        Operation by operation: recurrences as `scan_error`, whitening as `whitened` says.
    """
    advantages, returns = _estimated(settings, given)
    if settings.opd_coef and settings.estimator != "opd":
        advantages = advantages + _distilled(settings, given)
    if settings.whiten != "none":
        as_whitened = settings.clip is None and not given.overrides
        recorded = given.recorded if as_whitened else None
        advantages = whitened(advantages, **calls.whitening(settings, given), recorded=recorded)
        if calls.returns_whitened(settings):
            returns = advantages
    for kind, one in given.overrides.items():
        assert given.faults is not None
        zero = torch.zeros_like(advantages.value)
        ruled = Rounded(zero + one, zero + constant(one).error)
        advantages = ruled.where(given.faults == kind, advantages)
    if settings.clip is not None:
        advantages = advantages.clamped(*settings.clip)
    return Estimate(finite_or_nan(advantages.error), finite_or_nan(returns.error))


def _estimated(settings: AdvantageSettings, given: AdvantageInputs) -> tuple[Rounded, Rounded]:
    if settings.estimator == "opd":
        both = _distilled(settings, given)
        return both, both
    if settings.estimator in ("grpo", "reinforce++-baseline"):
        both = _broadcast(settings, given)
        return both, both
    rewards = _token_rewards(settings, given)
    if settings.estimator == "gae":
        return _gae(settings, given, rewards)
    returns = _returns(rewards, **calls.returns(settings, given))
    if settings.estimator == "reinforce++":
        return returns, returns
    if settings.estimator == "remax":
        assert given.greedy is not None
        greedy = in_float32(per_token("remax", "greedy", given.greedy, given.offsets))
        zero = exactly(torch.zeros_like(greedy.value))
        return returns - greedy.where(given.mask, zero), returns
    return _less_optimal_baseline(settings, given, rewards), returns


def _broadcast(settings: AdvantageSettings, given: AdvantageInputs) -> Rounded:
    if settings.reward_source == "token":
        assert given.token_rewards is not None
        return exactly(given.token_rewards)
    assert given.reward is not None
    values = exactly(grpo_advantages(given.reward, given.offsets.diff()))
    if settings.estimator == "grpo" or not settings.kl_in_reward or given.kl is None:
        return values
    return values - exactly(given.kl) * constant(given.kl_coef)


def _token_rewards(settings: AdvantageSettings, given: AdvantageInputs) -> ScanTerms:
    """Token rewards, with what the coefficient of the KL is off by, and their own roundings."""
    call, own = calls.token_rewards(settings, given)
    value, coef = token_rewards(**call), call["kl_coef"]
    alike, each = torch.zeros_like(value), torch.zeros_like(value)
    if coef and given.kl is not None:
        pays = call["loss_mask"] | (not call["kl_masked"])
        paid = torch.where(pays, given.kl.double(), 0.0).abs()
        alike = paid * constant(coef).error
        each = 2.0 * U * abs(coef) * paid + U * value.abs()
    if own is not None:
        value = value + own
        each = each + torch.where(each > 0.0, U * value.abs(), 0.0)
    return ScanTerms(value, alike, each)


def _returns(
    rewards: ScanTerms, loss_mask: Tensor, offsets: Tensor, gamma: float, masking: str
) -> Rounded:
    counted, decay = return_decay(loss_mask, offsets, gamma=gamma, masking=masking)
    terms = ScanTerms(*(torch.where(counted, one, 0.0) for one in rewards))
    error = torch.where((decay == 0.0) | (decay == 1.0), 0.0, decay_error(decay))
    found = scan_error(terms, decay, error, offsets)
    if masking in ("reset", "carry"):
        return found.where(counted, exactly(torch.zeros_like(found.value)))
    return found


def _gae(
    settings: AdvantageSettings, given: AdvantageInputs, rewards: ScanTerms
) -> tuple[Rounded, Rounded]:
    offsets = given.offsets
    gamma = per_token("gae", "gamma", settings.gamma, offsets)
    counted, x, values, following = gae_terms(rewards.value, **calls.gae(settings, given))
    ahead = (gamma * following).abs()
    alike = torch.where(
        counted, rewards.alike + constant(settings.gamma).error * following.abs(), 0.0
    )
    # Either order of the three: each partial sum is less than what it is the sum of.
    each = rewards.each + U * (2.0 * x.abs() + 3.0 * ahead + 2.0 * values.abs())
    still = (following == 0.0) & (values == 0.0) & (rewards.each == 0.0)
    each = torch.where(counted & ~still, each, 0.0)
    terms = ScanTerms(torch.where(counted, x + gamma * following - values, 0.0), alike, each)

    def estimated(lam: Tensor, off: Tensor) -> Rounded:
        decay = torch.where(counted, gamma * lam, 1.0)
        error = torch.where(counted, decay_error(gamma, lam) + gamma * off, 0.0)
        return scan_error(terms, decay, error, offsets)

    lam = per_token("gae", "lam", settings.lam, offsets)
    found = estimated(lam, torch.zeros_like(lam))
    if settings.lam_alpha is not None:
        own = length_adaptive_lambda(offsets.diff(), alpha=settings.lam_alpha)
        adaptive = per_token("gae", "lam", own, offsets)
        found = estimated(adaptive, torch.where(adaptive > 0.0, 4.0 * U, 0.0))
    targets = found
    if settings.lam_returns is not None:
        of_returns = per_token("gae", "lam", settings.lam_returns, offsets)
        targets = estimated(of_returns, torch.zeros_like(lam))
    return found, targets + exactly(values)


def _less_optimal_baseline(
    settings: AdvantageSettings, given: AdvantageInputs, rewards: ScanTerms
) -> Rounded:
    call, among = calls.optimal_baseline(settings, given)
    if among is None:
        return optimal_token_error(rewards, **call)
    found = optimal_token_error(ScanTerms(*(one[among] for one in rewards)), **call)
    zero = torch.zeros_like(rewards.value)
    return Rounded(zero.masked_scatter(among, found.value), zero.masked_scatter(among, found.error))


def _distilled(settings: AdvantageSettings, given: AdvantageInputs) -> Rounded:
    assert given.policy is not None
    assert given.teacher is not None
    away = exactly(given.teacher) - exactly(given.policy)
    return away * constant(settings.opd_coef)

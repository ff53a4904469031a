"""KL, advantages and returns of the response tokens, as their settings say."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.schema import AdvantageSettings, KlSettings
from trajreplay.stages.compose import calls
from trajreplay.stages.compose.advantage_inputs import AdvantageInputs
from trajreplay.stages.kernels.advantages import grpo_advantages
from trajreplay.stages.kernels.estimators import distillation_advantages, override_advantages
from trajreplay.stages.kernels.gae import gae_advantages, length_adaptive_lambda
from trajreplay.stages.kernels.kl_loss import weighted_kl
from trajreplay.stages.kernels.optimal_baseline import optimal_token_advantages
from trajreplay.stages.kernels.returns import (
    discounted_returns,
    kl_penalised_advantages,
    remax_advantages,
    token_rewards,
)
from trajreplay.stages.kernels.whitening import whiten


def kl_tokens(settings: KlSettings, policy: Tensor, reference: Tensor) -> Tensor:
    """The KL of policy against reference.

    Args:
        settings: The estimator, with a coefficient that is not 0.
        policy: (N,) float. Log-probabilities of the policy.
        reference: (N,) float. The same of the reference.

    Returns:
        (N,) in the dtype of `policy`. Nat.
    """
    value_clamp, log_ratio_clamp = settings.bounds
    return weighted_kl(
        policy,
        reference,
        estimator="k3" if settings.estimator == "low_var_kl" else settings.estimator,
        value_clamp=value_clamp,
        log_ratio_clamp=log_ratio_clamp,
    )


class Estimate(NamedTuple):
    """(N,) each. What a trainer records as `advantages` and `returns`."""

    advantages: Tensor
    returns: Tensor


def estimate_advantages(settings: AdvantageSettings, given: AdvantageInputs) -> Estimate:
    """Estimate, distill, whiten, override and clip.

    Args:
        settings: What is done.
        given: What it is done with.

    Returns:
        In the dtype of the rewards; returns are those of the estimator, or as whitened.
    """
    found = _estimated(settings, given)
    advantages = found.advantages
    if settings.opd_coef and settings.estimator != "opd":
        advantages = _distilled(settings, given, advantages)
    returns = found.returns
    if settings.whiten != "none":
        advantages = whiten(advantages, **calls.whitening(settings, given))
        if calls.returns_whitened(settings):
            returns = advantages
    for kind, one in given.overrides.items():
        assert given.faults is not None  # the capability matrix asks for them
        advantages = override_advantages(advantages, given.faults == kind, advantage=one)
    if settings.clip is not None:
        advantages = advantages.clamp(*settings.clip)
    return Estimate(advantages, returns)


def _estimated(settings: AdvantageSettings, given: AdvantageInputs) -> Estimate:
    if settings.estimator == "opd":
        both = _distilled(settings, given, None)
        return Estimate(both, both)
    if settings.estimator in ("grpo", "reinforce++-baseline"):
        both = _broadcast(settings, given)
        return Estimate(both, both)
    rewards = _token_rewards(settings, given)
    if settings.estimator == "gae":
        return _gae(settings, given, rewards)
    returns = discounted_returns(rewards, **calls.returns(settings, given))
    if settings.estimator == "reinforce++":
        return Estimate(returns, returns)
    if settings.estimator == "remax":
        assert given.greedy is not None
        advantages = remax_advantages(rewards, given.greedy, given.mask, given.offsets)
        return Estimate(advantages, returns)
    return Estimate(_less_optimal_baseline(settings, given, rewards), returns)


def _less_optimal_baseline(
    settings: AdvantageSettings, given: AdvantageInputs, rewards: Tensor
) -> Tensor:
    call, among = calls.optimal_baseline(settings, given)
    if among is None:
        return optimal_token_advantages(rewards, **call)
    found = optimal_token_advantages(rewards[among], **call)
    return torch.zeros_like(rewards).masked_scatter(among, found)


def _broadcast(settings: AdvantageSettings, given: AdvantageInputs) -> Tensor:
    """The reward of its sample, or its own, for each token."""
    if settings.reward_source == "token":
        assert given.token_rewards is not None
        return given.token_rewards
    assert given.reward is not None
    if settings.estimator == "grpo" or not settings.kl_in_reward or given.kl is None:
        return grpo_advantages(given.reward, given.offsets.diff())
    return kl_penalised_advantages(given.reward, given.kl, given.offsets, kl_coef=given.kl_coef)


def _token_rewards(settings: AdvantageSettings, given: AdvantageInputs) -> Tensor:
    """What returns are summed up from: rewards less the KL penalty."""
    call, own = calls.token_rewards(settings, given)
    rewards = token_rewards(**call)
    return rewards if own is None else rewards + own


def _gae(settings: AdvantageSettings, given: AdvantageInputs, rewards: Tensor) -> Estimate:
    lam: Tensor | float = settings.lam
    if settings.lam_alpha is not None:
        lam = length_adaptive_lambda(given.offsets.diff(), alpha=settings.lam_alpha)
    call = calls.gae(settings, given)
    found = targets = gae_advantages(rewards, gamma=settings.gamma, lam=lam, **call)
    if settings.lam_returns is not None:
        lam = settings.lam_returns
        targets = gae_advantages(rewards, gamma=settings.gamma, lam=lam, **call)
    return Estimate(found.advantages, targets.returns)


def _distilled(
    settings: AdvantageSettings, given: AdvantageInputs, advantages: Tensor | None
) -> Tensor:
    assert given.policy is not None
    assert given.teacher is not None
    return distillation_advantages(
        given.policy, given.teacher, advantages=advantages, coefficient=settings.opd_coef
    )

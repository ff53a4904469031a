"""KL, advantages and returns of the response tokens, as their settings say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from trajreplay.schema import AdvantageSettings, KlSettings
from trajreplay.stages.kernels.advantages import grpo_advantages
from trajreplay.stages.kernels.gae import gae_advantages, length_adaptive_lambda
from trajreplay.stages.kernels.kl_loss import weighted_kl
from trajreplay.stages.kernels.returns import (
    discounted_returns,
    kl_penalised_advantages,
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
    return weighted_kl(
        policy,
        reference,
        estimator="k3" if settings.estimator == "low_var_kl" else settings.estimator,
        value_clamp=settings.value_clamp,
        log_ratio_clamp=settings.log_ratio_clamp,
    )


@dataclass(frozen=True)
class AdvantageInputs:
    """What advantages are made of.

    Args:
        reward: (S,) float. Processed rewards.
        mask: (N,) bool. Trainable tokens.
        offsets: (S+1,) int64. Where the tokens of each sample begin.
        whitened_with: (N,) int64. Which tokens share statistics; None where none is whitened.
        kl: (N,) float. None where no reward has a KL penalty.
        kl_coef: What it costs.
        values: (N,) float. The critic's; None without one.
    """

    reward: Tensor
    mask: Tensor
    offsets: Tensor
    whitened_with: Tensor | None = None
    kl: Tensor | None = None
    kl_coef: float = 0.0
    values: Tensor | None = None


class Estimate(NamedTuple):
    """(N,) each. What a trainer records as `advantages` and `returns`."""

    advantages: Tensor
    returns: Tensor


def estimate_advantages(settings: AdvantageSettings, given: AdvantageInputs) -> Estimate:
    """Estimate, whiten and clip.

    Args:
        settings: What is done.
        given: What it is done with.

    Returns:
        In the dtype of the rewards; returns are those before whitening.
    """
    found = _estimated(settings, given)
    advantages = found.advantages
    if settings.whiten != "none":
        advantages = whiten(
            advantages,
            given.mask,
            set_index=given.whitened_with,
            ddof=settings.whiten_ddof,
            epsilon=settings.whiten_epsilon,
            form=settings.whiten_form,
            scale=settings.whiten_scale,
            one_pass=settings.whiten_one_pass,
            short=settings.whiten_short,
        )
    if settings.clip is not None:
        advantages = advantages.clamp(*settings.clip)
    return Estimate(advantages, found.returns)


def _estimated(settings: AdvantageSettings, given: AdvantageInputs) -> Estimate:
    mask, offsets = given.mask, given.offsets
    coef = given.kl_coef if settings.kl_in_reward else 0.0
    if settings.estimator == "grpo":
        both = grpo_advantages(given.reward, offsets.diff())
        return Estimate(both, both)
    if settings.estimator == "reinforce++-baseline":
        if not coef or given.kl is None:
            both = grpo_advantages(given.reward, offsets.diff())
        else:
            both = kl_penalised_advantages(given.reward, given.kl, offsets, kl_coef=coef)
        return Estimate(both, both)
    rewards = token_rewards(
        given.reward, mask, offsets, reward_at=settings.reward_at, kl=given.kl, kl_coef=coef
    )
    if settings.estimator == "reinforce++":
        returns = discounted_returns(
            rewards, mask, offsets, gamma=settings.gamma, masking=settings.masking
        )
        return Estimate(returns, returns)
    lam: Tensor | float = settings.lam
    if settings.lam_alpha is not None:
        lam = length_adaptive_lambda(offsets.diff(), alpha=settings.lam_alpha)
    assert given.values is not None  # the capability matrix asks for them
    found = gae_advantages(
        rewards,
        given.values,
        mask,
        offsets,
        gamma=settings.gamma,
        lam=lam,
        masking=settings.masking,
    )
    return Estimate(found.advantages, found.returns)

"""KL, advantages and returns of the response tokens, as their settings say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.schema import AdvantageSettings, KlSettings
from trajreplay.stages.kernels.advantages import grpo_advantages
from trajreplay.stages.kernels.estimators import distillation_advantages, override_advantages
from trajreplay.stages.kernels.gae import Gae, gae_advantages, length_adaptive_lambda
from trajreplay.stages.kernels.kl_loss import weighted_kl
from trajreplay.stages.kernels.optimal_baseline import optimal_token_advantages
from trajreplay.stages.kernels.returns import (
    discounted_returns,
    kl_penalised_advantages,
    remax_advantages,
    token_rewards,
)
from trajreplay.stages.kernels.segments import segment_sum
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
    """What advantages are made of; what no setting asks for is None.

    Args:
        mask: (N,) bool. Tokens that count: the trainable ones, or those of them that are kept.
        offsets: (S+1,) int64. Where the tokens of each sample begin.
        reward: (S,) float. Processed rewards.
        whitened_with: (N,) int64. Which tokens share statistics.
        kl: (N,) float. The KL that token rewards pay.
        kl_coef: What it costs.
        values: (N,) float. The critic's.
        token_rewards: (N,) float. The tokens' own rewards.
        greedy: (S,) float. Rewards of the greedy responses.
        group: (S,) int64. The group of each sample.
        policy: (N,) float. Log-probabilities of the policy.
        teacher: (N,) float. Log-probabilities of its teacher.
        sum_pi_squared: (N,) float. Sums of squared probabilities.
        weights: (N,) float. Importance weights of the rollout.
        bootstrap: (S,) float. The critic's value past the last token, 0 where it is not taken.
        faults: (N,) integer. What is wrong with the message of each token.
        overrides: What its tokens get, by the number of the fault.
        trained: (N,) bool. All trainable tokens, where fewer count.
    """

    mask: Tensor
    offsets: Tensor
    reward: Tensor | None = None
    whitened_with: Tensor | None = None
    kl: Tensor | None = None
    kl_coef: float = 0.0
    values: Tensor | None = None
    token_rewards: Tensor | None = None
    greedy: Tensor | None = None
    group: Tensor | None = None
    policy: Tensor | None = None
    teacher: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    weights: Tensor | None = None
    bootstrap: Tensor | None = None
    faults: Tensor | None = None
    overrides: Mapping[int, float] = field(default_factory=dict)
    trained: Tensor | None = None


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
        In the dtype of the rewards; returns are those of the estimator.
    """
    found = _estimated(settings, given)
    advantages = found.advantages
    if settings.opd_coef and settings.estimator != "opd":
        advantages = _distilled(settings, given, advantages)
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
    for kind, one in given.overrides.items():
        assert given.faults is not None  # the capability matrix asks for them
        advantages = override_advantages(advantages, given.faults == kind, advantage=one)
    if settings.clip is not None:
        advantages = advantages.clamp(*settings.clip)
    return Estimate(advantages, found.returns)


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
    if settings.estimator == "reinforce++":
        returns = discounted_returns(
            rewards, given.mask, given.offsets, gamma=settings.gamma, masking=settings.masking
        )
        return Estimate(returns, returns)
    returns = discounted_returns(rewards, given.mask, given.offsets, masking="multiply")
    if settings.estimator == "remax":
        assert given.greedy is not None
        advantages = remax_advantages(rewards, given.greedy, given.mask, given.offsets)
        return Estimate(advantages, returns)
    return Estimate(_less_optimal_baseline(settings, given, rewards), returns)


def _less_optimal_baseline(
    settings: AdvantageSettings, given: AdvantageInputs, rewards: Tensor
) -> Tensor:
    policy, squares, group = given.policy, given.sum_pi_squared, given.group
    assert policy is not None
    assert squares is not None
    assert group is not None
    mask, offsets, weights = given.mask, given.offsets, given.weights
    columns = (rewards, policy, squares, mask)
    if settings.otb_positions == "trained":
        columns = (rewards[mask], policy[mask], squares[mask], mask[mask])
        weights = None if weights is None else weights[mask]
        counts = segment_sum(mask.double(), offsets).long()
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    found = optimal_token_advantages(
        *columns, group, offsets, weights=weights, zero_tail=settings.otb_zero_tail
    )
    if settings.otb_positions == "all":
        return found
    return torch.zeros_like(rewards).masked_scatter(mask, found)


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
    own = given.token_rewards if settings.reward_source == "token" else None
    of_samples = given.reward if own is None else own.new_zeros(given.offsets.numel() - 1)
    assert of_samples is not None
    rewards = token_rewards(
        of_samples,
        given.mask if given.trained is None else given.trained,
        given.offsets,
        reward_at=settings.reward_at,
        kl=given.kl,
        kl_coef=given.kl_coef if settings.kl_in_reward else 0.0,
        kl_masked=settings.kl_masked,
    )
    return rewards if own is None else rewards + own


def _gae(settings: AdvantageSettings, given: AdvantageInputs, rewards: Tensor) -> Estimate:
    lam: Tensor | float = settings.lam
    if settings.lam_alpha is not None:
        lam = length_adaptive_lambda(given.offsets.diff(), alpha=settings.lam_alpha)
    values = given.values
    assert values is not None

    def estimated(lam: Tensor | float) -> Gae:
        return gae_advantages(
            rewards,
            values,
            given.mask,
            given.offsets,
            gamma=settings.gamma,
            lam=lam,
            masking=settings.masking,
            bootstrap=given.bootstrap,
        )

    found = estimated(lam)
    targets = found if settings.lam_returns is None else estimated(settings.lam_returns)
    return Estimate(found.advantages, targets.returns)


def _distilled(
    settings: AdvantageSettings, given: AdvantageInputs, advantages: Tensor | None
) -> Tensor:
    assert given.policy is not None
    assert given.teacher is not None
    return distillation_advantages(
        given.policy, given.teacher, advantages=advantages, coefficient=settings.opd_coef
    )

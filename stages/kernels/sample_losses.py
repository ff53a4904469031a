"""Policy losses that weigh whole samples: GMPO by a geometric mean, VESPO by a gamma density."""

from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.masked import masked_mean, masked_sum, spread
from trajreplay.stages.kernels.segments import check_shapes

# TRL, get_gamma_weights: bounds of a token's log-ratio and of a sample's, and the least lambda.
VESPO_TOKEN_CLAMP = (-20.0, 20.0)
VESPO_CLAMP = (log(1e-8), 20.0)
LEAST_RATE = 1e-4


class GmpoLoss(NamedTuple):
    """The loss and ratio of each sample, and the tokens that were clipped at either end."""

    pg_loss: Tensor
    ratio: Tensor
    clipped: Tensor
    clipped_low: Tensor


class VespoLoss(NamedTuple):
    """The loss of each token and the weight of its sample."""

    pg_loss: Tensor
    phi: Tensor


def gmpo_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    epsilon: float = 0.0,
) -> GmpoLoss:
    """Score each sample by the geometric mean of its ratios, clipped token by token.

        c_t = sgn(A_t) min(sgn(A_t) l_t, sgn(A_t) clamp(l_t, -eps, eps_high))
        pg_loss_s = -mean_t(A_t) exp(mean_t(c_t))      means over the trained tokens

    Args:
        log_ratio: (N,) float. Current to old policy. Nat.
        advantages: (N,) float. Dimensionless.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        eps_clip: How far below 0 a log-ratio counts. Nat.
        eps_clip_high: How far above 0, the same as below if None. Nat.
        epsilon: What is added to the counts; 0 divides by at least 1. Token.

    Returns:
        pg_loss and ratio, (S,), and two (N,) tensors, 1 where the clamp changes the log-ratio of a
        positive advantage (clipped) or of a negative one (clipped_low); all in the dtype of the
        inputs. Dimensionless.

    Raises:
        StageError: The inputs differ in length, or `offsets` do not cover them.

    Conventions:
        The bounds are those of the log-ratio, not of the ratio. verl (`geo_mean`) adds 1e-8 to the
        counts and averages over all samples of the micro-batch: one without trained tokens has
        loss 0 and counts. The two counts are verl's: they also count clamps that the minimum then
        undoes. Sums run in float64.

    Source:
        Zhao et al. 2025, GMPO, arXiv:2507.20673.

    >>> l, offsets = torch.tensor([0.5, 0.1]), torch.tensor([0, 2])
    >>> gmpo_loss(l, torch.ones(2), torch.ones(2), offsets).ratio
    tensor([1.1618])
    """
    check_shapes("gmpo_loss", log_ratio=(log_ratio, "N"), advantages=(advantages, "N"))
    high = eps_clip if eps_clip_high is None else eps_clip_high
    sign = advantages.sign()
    clamped = log_ratio.clamp(-eps_clip, high)
    least = sign * torch.minimum(sign * log_ratio, sign * clamped)
    ratio = masked_mean(least, mask, offsets, epsilon=epsilon).exp()
    loss = -masked_mean(advantages, mask, offsets, epsilon=epsilon) * ratio
    changed = (clamped != log_ratio) & ~torch.isnan(log_ratio)
    dtype = least.dtype
    return GmpoLoss(
        loss.to(dtype),
        ratio.to(dtype),
        (changed & (advantages > 0.0)).to(dtype),
        (changed & (advantages < 0.0)).to(dtype),
    )


def vespo_loss(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    rollout_weights: Tensor | None = None,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> VespoLoss:
    """Weigh the log-probabilities of a sample by a gamma density of its ratio.

        pg_loss = -phi A log pi      phi = exp(lambda + k log w - lambda w)
        log w = clamp(sum_t m_t (clamp(l_t, +-20) + clamp(log v_t, log 1e-8, 20)), log 1e-8, 20)

    Args:
        log_probs: (N,) float. Log-probability of each token under the current policy. Nat.
        log_ratio: (N,) float. Current to old policy, l. Nat.
        advantages: (N,) float. Dimensionless.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        rollout_weights: (N,) float. v, old to rollout policy, bounded or not; None for 1.
            Dimensionless.
        positive: k and lambda of advantages of 0 and more. Dimensionless.
        negative: k and lambda of advantages below 0. Dimensionless.

    Returns:
        Two (N,) tensors in the dtype of the inputs: pg_loss (nat) and phi (dimensionless).

    Raises:
        StageError: The inputs differ in length, or `offsets` do not cover them.

    Conventions:
        phi is 1 at a ratio of 1 and carries no gradient. lambda is at least 1e-4, and a phi that
        is not finite is 0. A weight of 0, a token that the rollout correction dropped, counts as
        1e-8. The sum runs in float64, over the trained tokens only. Nothing is clipped.

    Source:
        TRL, `GRPOTrainer.get_gamma_weights` (`loss_type="vespo"`).

    >>> zero, offsets = torch.zeros(2), torch.tensor([0, 2])
    >>> vespo_loss(zero - 0.5, zero, zero + 2.0, zero + 1.0, offsets)
    VespoLoss(pg_loss=tensor([1., 1.]), phi=tensor([1., 1.]))
    """
    check_shapes(
        "vespo_loss",
        log_probs=(log_probs, "N"),
        log_ratio=(log_ratio, "N"),
        advantages=(advantages, "N"),
    )
    total = masked_sum(log_ratio.clamp(*VESPO_TOKEN_CLAMP), mask, offsets)
    if rollout_weights is not None:
        total += masked_sum(rollout_weights.log().clamp(*VESPO_CLAMP), mask, offsets)
    log_weight = spread(total.clamp(*VESPO_CLAMP), offsets)
    gains = advantages >= 0.0
    k, rate = (
        torch.where(gains, log_weight.new_tensor(gain), log_weight.new_tensor(loss))
        for gain, loss in zip(positive, negative, strict=True)
    )
    rate = rate.clamp(min=LEAST_RATE)
    phi = (rate + k * log_weight - rate * log_weight.exp()).exp()
    phi = phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).to(log_ratio.dtype)
    return VespoLoss(-phi * advantages * log_probs, phi)

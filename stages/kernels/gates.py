"""Policy losses that gate tokens otherwise than by a ratio's bounds: SAPO, DPPO, KL-Cov."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.options import check_option
from trajreplay.stages.kernels.segments import check_shapes
from trajreplay.stages.kernels.sets import TokenSets

RULES = ("by-sign", "absolute")

# Relax counts a token of SAPO as clipped where the slope of its gate, 1 at a ratio of 1, is less.
SAPO_SLOPE = 0.9


class GatedLoss(NamedTuple):
    """The loss of each token, and 1 where its gate acted."""

    pg_loss: Tensor
    gated: Tensor


def sapo_loss(
    log_ratio: Tensor, advantages: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> GatedLoss:
    """Score each token by a soft gate of its ratio.

        pg_loss = -A (4 / tau) p      p = sigmoid(tau (r - 1))      r = exp(l)
        tau = tau_pos if A > 0 else tau_neg      gated = 4 p (1 - p) < 0.9

    Args:
        log_ratio: (N,) float. Current to old policy. Nat.
        advantages: (N,) float. Dimensionless.
        tau_pos: Temperature of positive advantages. Dimensionless.
        tau_neg: Temperature of the others, 0 among them. Dimensionless.

    Returns:
        Two (N,) tensors in the dtype of the inputs. Dimensionless.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        verl clamps the log-ratio to -20 and 20 before; TRL, AReaL and Relax do not. gated is what
        Relax reports as the clip fraction, verl and AReaL report 0. verl averages by
        seq-mean-token-mean whatever is configured, AReaL by tokens. Masks are not looked at.

    Source:
        Gao et al. 2025, SAPO, arXiv:2511.20347.

    >>> sapo_loss(torch.tensor([0.0, 1.5]), torch.tensor([1.0, 1.0]))
    GatedLoss(pg_loss=tensor([-2.0000, -3.8806]), gated=tensor([0., 1.]))
    """
    check_shapes("sapo_loss", log_ratio=(log_ratio, "N"), advantages=(advantages, "N"))
    positive, negative = log_ratio.new_tensor(tau_pos), log_ratio.new_tensor(tau_neg)
    tau = torch.where(advantages > 0.0, positive, negative)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0))
    gated = 4.0 * gate * (1.0 - gate) < SAPO_SLOPE
    return GatedLoss(-(4.0 / tau) * gate * advantages, gated.to(gate.dtype))


def dppo_loss(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    rule: str = "by-sign",
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> GatedLoss:
    """Score each token unless its probability moved too far from the rollout's.

        pg_loss = -(1 - gated) adv_tau A exp(l) + kl_tau l^2      l = log pi - log rollout
        by-sign: gated = p - q > high if A > 0 else p - q < -low      p, q: the probabilities
        absolute: gated = p - q > high or p - q < -low

    Args:
        log_probs: (N,) float. Log-probability of each token under the current policy. Nat.
        rollout_log_probs: (N,) float. The same where it was sampled. Nat.
        advantages: (N,) float. Dimensionless.
        low: How far a probability may fall. Dimensionless.
        high: How far it may rise. Dimensionless.
        rule: `by-sign` or `absolute`.
        adv_tau: Weight of the advantages. Dimensionless.
        kl_tau: Weight of the squared log-ratio. Per squared nat.

    Returns:
        Two (N,) tensors in the dtype of the inputs. Dimensionless.

    Raises:
        StageError: The inputs differ in length, or the rule is neither.

    Conventions:
        prime-rl's default; its `ipo` is the absolute rule with 0.1 on both sides. An advantage of
        0 has the bound of negative ones. The squared log-ratio is not halved, is taken against
        the rollout, and stays where the token is gated. prime-rl divides the sum over all tokens
        by their global count. Masks are not looked at.

    Source:
        prime-rl, `default_loss_fn`; DPPO 2026, arXiv:2602.04879.

    >>> log_probs, rollout = torch.tensor([-0.2, -2.0]), torch.tensor([-0.6, -2.1])
    >>> dppo_loss(log_probs, rollout, torch.ones(2)).gated
    tensor([1., 0.])
    """
    check_shapes(
        "dppo_loss",
        log_probs=(log_probs, "N"),
        rollout_log_probs=(rollout_log_probs, "N"),
        advantages=(advantages, "N"),
    )
    check_option("dppo_loss", "rule", rule, RULES)
    moved = log_probs.exp() - rollout_log_probs.exp()
    rises, falls = moved > high, moved < -low
    gated = rises | falls
    if rule == "by-sign":
        gated = torch.where(advantages > 0.0, rises, falls)
    difference = log_probs - rollout_log_probs
    gain = torch.where(gated, 0.0, adv_tau * advantages * difference.exp())
    loss = kl_tau * difference.square() - gain
    return GatedLoss(loss, gated.to(loss.dtype))


def kl_cov_loss(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    fraction: float = 0.0002,
    kl_coef: float = 0.1,
    index: Tensor | None = None,
    size: int = 1,
) -> GatedLoss:
    """Penalise the tokens whose log-probability varies most with their advantage.

        pg_loss = -A exp(l) + gated kl_coef |l|      c = (A - mean(A)) (log pi - mean(log pi))
        gated: the max(1, floor(fraction n)) largest c among the n trained tokens of a micro-batch

    Args:
        log_probs: (N,) float. Log-probability of each token under the current policy. Nat.
        log_ratio: (N,) float. Current to old policy, l. Nat.
        advantages: (N,) float. Dimensionless.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        fraction: Share of the trained tokens that is penalised. Dimensionless.
        kl_coef: Weight of the penalty. Per nat.
        index: (S,) int64. The micro-batch of each sample; None if all are one.
        size: How many micro-batches there are.

    Returns:
        Two (N,) tensors in the dtype of the inputs. Dimensionless.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, or an index lies
            outside.

    Conventions:
        verl's `kl_cov`: nothing is clipped, and its coefficient is 0.1 in the configuration but 1
        in the code where none is given. Means are of the micro-batch and run in float64. Of equal
        covariances the first is taken. Masked tokens are never gated. Its sibling `clip_cov`
        draws at random and cannot be computed again.

    Source:
        Cui et al. 2025, The entropy mechanism, arXiv:2505.22617.

    >>> log_probs, advantages = torch.tensor([-0.5, -2.0, -1.0]), torch.tensor([1.0, -1.0, 0.0])
    >>> tokens = kl_cov_loss(
    ...     log_probs, torch.zeros(3), advantages, torch.ones(3), torch.tensor([0, 3])
    ... )
    >>> tokens.gated
    tensor([0., 1., 0.])
    """
    check_shapes(
        "kl_cov_loss",
        log_probs=(log_probs, "N"),
        log_ratio=(log_ratio, "N"),
        advantages=(advantages, "N"),
    )
    sets = TokenSets.of("kl_cov_loss", mask, offsets, index, size)
    chosen = sets.chosen(advantages)
    deviation = chosen - sets.spread(sets.mean(chosen))
    chosen = sets.chosen(log_probs)
    covariance = deviation * (chosen - sets.spread(sets.mean(chosen)))
    allowed = (fraction * sets.count).floor().clamp(min=1.0)
    gated = sets.scatter(sets.rank(covariance, descending=True) < sets.spread(allowed))
    loss = -advantages * log_ratio.exp()
    penalty = torch.where(gated, kl_coef * log_ratio.abs(), 0.0)
    return GatedLoss(loss + penalty, gated.to(loss.dtype))

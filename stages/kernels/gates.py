"""Policy losses that gate tokens otherwise than by bounds: SAPO softly, KL-Cov by covariance."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.precision import FLOAT32_ROUNDOFF, reduction_factor
from trajreplay.stages.kernels.segments import check_shapes
from trajreplay.stages.kernels.sets import TokenSets

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
    covariance, _ = _covariances(sets, log_probs, advantages)
    gated = sets.scatter(
        sets.rank(covariance, descending=True) < sets.spread(_allowed(sets, fraction))
    )
    loss = -advantages * log_ratio.exp()
    penalty = torch.where(gated, kl_coef * log_ratio.abs(), 0.0)
    return GatedLoss(loss + penalty, gated.to(loss.dtype))


class Undecided(NamedTuple):
    """Penalties that rounding may give to other tokens: of each set as many as it gates.

    Args:
        penalty: (N,) float64. What an undecided token pays where it is gated, 0 at others.
        allowed: (S,) float64. How many tokens are gated of the micro-batch of each sample.
    """

    penalty: Tensor
    allowed: Tensor


def kl_cov_undecided(
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
) -> Undecided:
    """Find the penalties of which rounding decides who pays them.

        p_t = kl_coef |l| of the undecided t, else 0

    Args:
        log_probs: (N,) float. As in `kl_cov_loss`, and so are the others.
        log_ratio: As there.
        advantages: As there.
        mask: As there.
        offsets: As there.
        fraction: As there.
        kl_coef: As there.
        index: As there.
        size: As there.

    Returns:
        (N,) float64, and (S,). Over any tokens of a micro-batch their sum, and `allowed` times the
        largest of them, bound what their loss may be off by. Dimensionless.

    Raises:
        StageError: As there.

    Conventions:
        k tokens of a micro-batch are gated. A token is undecided whose covariance lies within the
        float32 errors of both of one on the other side: of equal advantages all covariances are 0,
        or the rounding of their mean, and whoever a trainer's search happens on is penalised.

    Source:
        `reduction_factor` for the means.

    >>> log_probs, even = torch.tensor([-0.5, -2.0, -1.0]), torch.ones(3)
    >>> kl_cov_undecided(log_probs, even, even, even, torch.tensor([0, 3])).penalty
    tensor([0.1000, 0.1000, 0.1000], dtype=torch.float64)
    """
    sets = TokenSets.of("kl_cov_undecided", mask, offsets, index, size)
    covariance, error = _covariances(sets, log_probs, advantages)
    allowed = _allowed(sets, fraction)
    gated = sets.rank(covariance, descending=True) < sets.spread(allowed)
    lowest = sets.least(torch.where(gated, covariance - error, torch.inf))
    highest = -sets.least(torch.where(gated, torch.inf, -(covariance + error)))
    near = torch.where(
        gated,
        covariance - error <= sets.spread(highest),
        covariance + error >= sets.spread(lowest),
    )
    penalty = torch.where(sets.scatter(near), kl_coef * log_ratio.double().abs(), 0.0)
    return Undecided(penalty, allowed[sets.samples])


def _allowed(sets: TokenSets, fraction: float) -> Tensor:
    """(K,) How many tokens of each set are gated."""
    return (fraction * sets.count).floor().clamp(min=1.0)


def _covariances(sets: TokenSets, log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) float64 each. The covariance of each trained token, and how far float32 may be off."""
    factor = reduction_factor(sets.count)
    deviations, errors = [], []
    for values in (advantages, log_probs):
        chosen = sets.chosen(values)
        deviation = chosen - sets.spread(sets.mean(chosen))
        off = sets.spread(factor * sets.mean(chosen.abs()))
        deviations.append(deviation)
        errors.append(off + FLOAT32_ROUNDOFF * (deviation.abs() + off))
    (first, second), (one, two) = deviations, errors
    error = first.abs() * two + second.abs() * one + one * two
    covariance = first * second
    return covariance, error + FLOAT32_ROUNDOFF * (covariance.abs() + error)

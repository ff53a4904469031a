"""What float32 may change of the optimal token baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.stages.kernels.groups import groups_of
from trajreplay.stages.kernels.optimal_baseline import baseline_cells, shared_length
from trajreplay.stages.kernels.precision import FLOAT32_ROUNDOFF, accumulation_factor
from trajreplay.stages.kernels.rounded import Rounded, exactly
from trajreplay.stages.kernels.scan_error import ScanTerms, scan_error
from trajreplay.stages.kernels.scans import sample_of
from trajreplay.stages.kernels.segments import segment_sum

U = FLOAT32_ROUNDOFF
# A variance is an exponential of 2 ulp, a product and two sums; a squared weight is an exponential
# of a difference, squared.
_VARIANCE, _WEIGHT = 8.0 * U, 64.0 * U


def optimal_token_error(
    rewards: ScanTerms,
    log_probs: Tensor,
    sum_pi_squared: Tensor,
    loss_mask: Tensor,
    group_index: Tensor,
    offsets: Tensor,
    *,
    weights: Tensor | None = None,
    zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> Rounded:
    """Take the baseline off as `optimal_token_advantages`, with a bound of its float32 error.

        e(W) as of a recurrence      e(P) = sum (|G| e(W) + |W| e(G)) + f sum |G W|
        e(B) = (e(P) + |B| (sum e(W) + f sum |W|)) / (sum W - e(sum W))      e(A) = e(G) + e(B)

    Args:
        rewards: (N,), and what they may be off by.
        log_probs: (N,) float. As there, and so are the others.
        sum_pi_squared: As there.
        loss_mask: As there.
        group_index: As there.
        offsets: As there.
        weights: As there.
        zero_tail: As there.
        epsilon: As there.

    Returns:
        (N,), exact values and bounds. Where the sum of variances may be 0 there is none.

    Source:
        Higham 2002, Accuracy and stability of numerical algorithms, section 3.3; f:
        `accumulation_factor`.
    """
    unmasked = loss_mask != 0
    ones, zeros = torch.ones_like(rewards.value), torch.zeros_like(rewards.value)
    own = ScanTerms(*(torch.where(unmasked, one, 0.0) for one in rewards))
    returns = scan_error(own, ones, zeros, offsets)
    rho = ones if weights is None else weights.double()
    probability, squared = log_probs.double().exp(), rho**2
    variance = (1.0 - 2.0 * probability + sum_pi_squared.double()) * squared
    error = _VARIANCE * (1.0 + 2.0 * probability + sum_pi_squared.double()) * squared
    error = error + torch.where(rho == 1.0, 0.0, _WEIGHT * variance.abs())
    steps = ScanTerms(*(torch.where(unmasked, one, 0.0) for one in (variance, zeros, error)))
    path = scan_error(steps, ones, zeros, offsets, reverse=False)
    path = path.where(unmasked, exactly(zeros))

    sample, groups = sample_of(offsets), groups_of(group_index)
    position = torch.arange(sample.numel(), device=offsets.device) - offsets[:-1][sample]
    cells = baseline_cells(groups, sample, position, offsets)
    factor = accumulation_factor(cells.size + 2.0)
    product = returns.value * path.value
    spread = returns.value.abs() * path.error + (path.value.abs() + path.error) * returns.error
    above = cells.sum(spread) + factor * cells.sum(product.abs() + spread)
    total = cells.sum(path.value) + epsilon
    below = cells.sum(path.error) + factor * (cells.sum(path.value.abs() + path.error) + epsilon)
    baseline = cells.sum(product) / total
    off = (above + baseline.abs() * below) / (total.abs() - below) + 2.0 * U * baseline.abs()
    off = torch.where(total.abs() > below, off, torch.nan)
    taken = Rounded(baseline[cells.member], off[cells.member])

    counted = segment_sum(unmasked.double(), offsets)
    end = shared_length(groups, counted) if zero_tail else torch.full_like(counted, torch.inf)
    alone = groups.size[groups.member] == 1.0
    has_baseline = (position < end[sample]) & ~alone[sample]
    found = (returns - taken).where(has_baseline, returns)
    return found.where(unmasked, exactly(zeros))

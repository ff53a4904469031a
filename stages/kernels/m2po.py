"""M2PO, which is two algorithms: a mask of tokens in AReaL, bounds of the ratio in Relax."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.options import check_positive
from trajreplay.stages.kernels.segments import check_shapes
from trajreplay.stages.kernels.sets import TokenSets

# Relax, after the M2PO release: what counts as equal, and tau where nothing has to be clipped.
M2PO_TINY = 1e-12
M2PO_UNBOUNDED = 100000.0


class M2poLoss(NamedTuple):
    """The loss of each token; the bounds of each micro-batch, its moment before and after."""

    pg_loss: Tensor
    clipped: Tensor
    eps_low: Tensor
    eps_high: Tensor
    moment: Tensor
    moment_after: Tensor


def m2po_keep(
    log_weights: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    threshold: float = 0.04,
    index: Tensor | None = None,
    size: int = 1,
) -> Tensor:
    """Keep the trained tokens of smallest squared log-weight whose mean is below a threshold.

        keep: the k smallest d_t^2 of a micro-batch, k the most for which their mean < threshold

    Args:
        log_weights: (N,) float. d: proximal against rollout log-probs, either way round. Nat.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        threshold: The mean that is not reached, more than 0. Squared nat.
        index: (S,) int64. The micro-batch of each sample; None if all are one.
        size: How many micro-batches there are.

    Returns:
        (N,) bool, false where masked.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, an index lies
            outside, or the threshold is not positive.

    Conventions:
        AReaL `m2_threshold`: the sign of the advantage plays no part, at least one token of a
        micro-batch is kept, and its mean is then over the kept tokens while the weight of the
        micro-batch still counts all. Of equal tokens the first are kept. NaN counts as largest.
        Sums run in float64.

    Source:
        Zheng et al. 2025, M2PO, arXiv:2510.01161, as in AReaL.

    >>> d = torch.tensor([0.1, 0.5, 0.2, 0.0, 0.3])
    >>> m2po_keep(d, torch.ones(5), torch.tensor([0, 5]))
    tensor([ True, False,  True,  True,  True])
    """
    check_shapes("m2po_keep", log_weights=(log_weights, "N"), mask=(mask, "N"))
    check_positive("m2po_keep", "threshold", threshold)
    sets = TokenSets.of("m2po_keep", mask, offsets, index, size)
    moments = sets.chosen(log_weights).square()
    rank = sets.rank(moments)
    rising = sets.rows(moments, rank)
    number = torch.arange(1, rising.shape[1] + 1, device=rising.device)
    kept = (rising.cumsum(1) / number < threshold).sum(1).clamp(min=1)
    return sets.scatter(rank < sets.spread(kept))


def m2po_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    budget: float = 0.01,
    least_low: float = 0.3,
    least_high: float = 0.5,
    index: Tensor | None = None,
    size: int = 1,
) -> M2poLoss:
    """Clip ratios by bounds that hold the second moment of harmful tokens within a budget.

        harmful: A > 0 and r > 1, or A < 0 and r < 1      v: their l^2, rising, n of them
        c_j = sum_{i <= j} v_i + (n - 1 - j) v_j      tau^2 = v_{j-1}, j the first c_j >= n budget
        eps_low = max(1 - exp(-tau), least_low)      eps_high = max(exp(tau) - 1, least_high)

    Args:
        log_ratio: (N,) float. Current to old policy, l. Nat.
        advantages: (N,) float. Dimensionless.
        mask: (N,) bool, integer or float. Not 0 where a token may be harmful.
        offsets: (S+1,) int64. Where each sample begins, and N.
        budget: Highest mean of v that is not clipped. Squared nat.
        least_low: Least width below 1. Dimensionless.
        least_high: Least width above 1. Dimensionless.
        index: (S,) int64. The micro-batch of each sample; None if all are one.
        size: How many micro-batches there are.

    Returns:
        pg_loss and clipped, (N,) in the dtype of the inputs, as of `ppo_clip`; and four (size,)
        float64 tensors: eps_low and eps_high (dimensionless), moment, the mean of v, and
        moment_after, that of v clipped to tau^2 (squared nat).

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, an index lies
            outside, or the budget is not positive.

    Conventions:
        Relax, per micro-batch. tau is a token's own value, the largest that stays below the
        budget, not the exact solution; if already the smallest is too large it is 0 and
        moment_after is the moment. Within the budget the bounds are 0 and 100000. Relax did not
        look at the mask until later: give ones for that. Comparisons have a slack of 1e-12. Sums
        run in float64.

    Source:
        Zheng et al. 2025, M2PO, arXiv:2510.01161, as in Relax, `compute_m2po_loss`.

    >>> l, gains = torch.tensor([1.0, -0.1]), torch.tensor([1.0, -1.0])
    >>> m2po_loss(l, gains, torch.ones(2), torch.tensor([0, 2]), budget=0.2).pg_loss
    tensor([-1.5000,  0.9048])
    """
    check_shapes("m2po_loss", log_ratio=(log_ratio, "N"), advantages=(advantages, "N"))
    check_positive("m2po_loss", "budget", budget)
    sets = TokenSets.of("m2po_loss", mask, offsets, index, size)
    ratio = log_ratio.exp()
    harmful = (advantages > M2PO_TINY) & (ratio > 1.0 + M2PO_TINY)
    harmful |= (advantages < -M2PO_TINY) & (ratio < 1.0 - M2PO_TINY)
    tau, moment, moment_after = _tau(sets, log_ratio, harmful, budget)
    eps_low = (1.0 - torch.exp(-tau)).clamp(min=least_low)
    eps_high = (tau.exp().clamp(max=M2PO_UNBOUNDED) - 1.0).clamp(min=least_high)
    low = sets.everywhere(1.0 - eps_low, offsets).to(ratio.dtype)
    high = sets.everywhere(1.0 + eps_high, offsets).to(ratio.dtype)
    surrogate = -advantages * ratio
    bounded = -advantages * ratio.clamp(low, high)
    pg_loss = torch.maximum(surrogate, bounded)
    clipped = (bounded > surrogate).to(pg_loss.dtype)
    return M2poLoss(pg_loss, clipped, eps_low, eps_high, moment, moment_after)


def _tau(
    sets: TokenSets, log_ratio: Tensor, harmful: Tensor, budget: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the bound of each set's log-ratios; infinite where the budget holds."""
    counted = sets.chosen(harmful).bool()
    squares = sets.chosen(log_ratio).square()
    count = sets.sum(counted.double())
    total = sets.sum(torch.where(counted, squares, 0.0))
    moment = total / count.clamp(min=1.0)
    harmful_only = torch.where(counted, squares, torch.inf)
    rising = sets.rows(harmful_only, sets.rank(harmful_only))
    number = torch.arange(rising.shape[1], device=rising.device)
    inside = number < count[:, None]
    values = torch.where(inside, rising, 0.0)
    sums = values.cumsum(1)
    rest = count[:, None] - number - 1.0
    reaches = (values - M2PO_TINY) * rest + sums >= (count * budget)[:, None] - M2PO_TINY
    below = (inside & ~reaches).sum(1)
    last = (below - 1).clamp(min=0)[:, None]
    if not rising.shape[1]:
        return torch.full_like(count, torch.inf), moment, moment
    square = values.gather(1, last).squeeze(1)
    sum_below = sums.gather(1, last).squeeze(1)
    after = (square * (count - below) + sum_below) / count.clamp(min=1.0)
    tau = (square - M2PO_TINY).clamp(min=0.0).sqrt()
    free = (moment <= budget + M2PO_TINY) | (below >= count)
    tau = torch.where(below > 0, tau, 0.0).masked_fill(free, torch.inf)
    return tau, moment, torch.where(free | (below == 0), moment, after)

"""The optimal token baseline: the returns of a group averaged by accumulated path variance."""

import torch
from torch import Tensor

from trajreplay.stages.kernels.groups import Groups, groups_of
from trajreplay.stages.kernels.options import in_dtype_of
from trajreplay.stages.kernels.returns import discounted_returns
from trajreplay.stages.kernels.scans import linear_scan, sample_of
from trajreplay.stages.kernels.segments import check_segments, check_shapes, segment_sum


def optimal_token_advantages(
    rewards: Tensor,
    log_probs: Tensor,
    sum_pi_squared: Tensor,
    loss_mask: Tensor,
    group_index: Tensor,
    offsets: Tensor,
    *,
    weights: Tensor | None = None,
    zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> Tensor:
    """Take off each return the one that its group expects at the same position.

        w_t = (1 - 2 pi_t + sum pi^2) rho_t^2      W_t = sum_{u <= t} m_u w_u
        B_t = sum_g m G W / (sum_g m W + epsilon)      A_t = m_t (G_t - B_t)

    Args:
        rewards: (N,) float. The reward of each token; G are their returns, masked ones left out.
        log_probs: (N,) float. Of the sampled tokens, log pi. Nat.
        sum_pi_squared: (N,) float. The squared probabilities of all tokens, summed.
        loss_mask: (N,) bool, integer or float, m. 1 where a token counts.
        group_index: (S,) int64. The group of each sample, any numbers in any order.
        offsets: (S+1,) int64. Where each sample begins, and N.
        weights: (N,) float, rho, the importance weights of the rollout; 1 if not given.
        zero_tail: Whether the one longest sample of a group has no baseline beyond the second.
        epsilon: Keeps the division finite. Dimensionless.

    Returns:
        (N,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        Sums run in float64, over the samples of the group that have the position, counted from the
        start of the response, masked tokens included. A group of one has no baseline. The length
        of a sample is the number of its tokens that count. What masked tokens hold has no effect.
        As in verl.

    Source:
        verl, optimal_token_baseline.

    >>> rewards, log_probs = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([-1.0, -1.0, -1.0])
    >>> args = torch.full((3,), 0.5), torch.ones(3), torch.tensor([0, 0]), torch.tensor([0, 1, 3])
    >>> optimal_token_advantages(rewards, log_probs, *args)
    tensor([ 0.5000, -0.5000,  0.0000])
    """
    kernel = "optimal_token_advantages"
    check_segments(kernel, rewards, offsets)
    given = {
        "rewards": (rewards, "N"),
        "log_probs": (log_probs, "N"),
        "sum_pi_squared": (sum_pi_squared, "N"),
        "loss_mask": (loss_mask, "N"),
        "weights": (rewards if weights is None else weights, "N"),
    }
    check_shapes(kernel, **given)
    check_shapes(kernel, samples=(offsets.diff(), "S"), group_index=(group_index, "S"))
    unmasked = loss_mask != 0
    returns = discounted_returns(rewards.double(), loss_mask, offsets, masking="multiply")
    variance = 1.0 - 2.0 * log_probs.double().exp() + sum_pi_squared.double()
    if weights is not None:
        variance = variance * weights.double() ** 2
    steps = torch.where(unmasked, variance, 0.0)
    path = linear_scan(steps, torch.ones_like(steps), offsets, reverse=False)
    path = torch.where(unmasked, path, 0.0)

    sample, groups = sample_of(offsets), groups_of(group_index)
    position = torch.arange(sample.numel(), device=offsets.device) - offsets[:-1][sample]
    cells = baseline_cells(groups, sample, position, offsets)
    baseline = (cells.sum(returns * path) / (cells.sum(path) + epsilon))[cells.member]
    counted = segment_sum(unmasked.double(), offsets)
    end = shared_length(groups, counted) if zero_tail else torch.full_like(counted, torch.inf)
    alone = groups.size[groups.member] == 1.0
    has_baseline = (position < end[sample]) & ~alone[sample]
    result = torch.where(has_baseline, returns - baseline, returns)
    return in_dtype_of(rewards, torch.where(unmasked, result, 0.0))


def baseline_cells(groups: Groups, sample: Tensor, position: Tensor, offsets: Tensor) -> Groups:
    """The tokens of one group at one position: a group has as many as its longest sample."""
    longest = -groups.least(-offsets.diff().double()).long()
    cell = (longest.cumsum(0) - longest)[groups.member][sample] + position
    return Groups(cell, cell.bincount().double())


def shared_length(groups: Groups, counted: Tensor) -> Tensor:
    """How far each sample shares its group: not at all an end, but for the one longest."""
    longest = -groups.least(-counted)[groups.member]
    leads = counted == longest
    leaders = groups.sum(leads.double())[groups.member]
    second = -groups.least(torch.where(leads, torch.inf, -counted))[groups.member]
    return torch.where(leads & (leaders == 1.0), second, torch.inf)

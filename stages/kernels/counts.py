"""Counts of trained tokens that losses are divided by: of sets, and of fragments that share one."""

import torch
from torch import Tensor

from trajreplay.stages.kernels.masked import masked_sum
from trajreplay.stages.kernels.segments import scatter_sum


def trained_tokens(
    mask: Tensor, offsets: Tensor, index: Tensor, size: int, *, least: int = 0
) -> Tensor:
    """Count the trained tokens of each set of samples.

        D_k = sum_{s in k} max(sum_t m_t, least)

    Args:
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        index: (S,) int64 in 0..size-1. The set of each sample.
        size: How many sets there are.
        least: What a sample counts at least. Token.

    Returns:
        (size,) float64. Token.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, or an index lies
            outside.

    Conventions:
        Every trainer counts from 0 but slime, whose token mean counts from 1.

    Source:
        The definition.

    >>> trained_tokens(torch.tensor([1, 1, 0]), torch.tensor([0, 2, 3]), torch.tensor([0, 0]), 1)
    tensor([2.], dtype=torch.float64)
    """
    count = masked_sum(torch.ones_like(mask, dtype=torch.bool), mask, offsets)
    return scatter_sum(count.clamp(min=float(least)), index, size)


def shared_tokens(mask: Tensor, offsets: Tensor, index: Tensor, size: int) -> Tensor:
    """Give each sample the trained tokens of all samples that it shares a rollout with.

        d_s = max(sum_{r in k(s)} sum_t m_t, 1)

    Args:
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        index: (S,) int64 in 0..size-1. The rollout of each sample.
        size: How many rollouts there are.

    Returns:
        (S,) float64. Token.

    Raises:
        StageError: As `trained_tokens`.

    Conventions:
        slime divides by it where samples share a `rollout_id`, Relax where they share
        `sample_indices`; the sum of the samples' means is then the mean of the rollout. The others
        divide each sample by its own count.

    Source:
        slime, `get_sum_of_sample_mean`.

    >>> mask, offsets = torch.tensor([1, 1, 0]), torch.tensor([0, 1, 2, 3])
    >>> shared_tokens(mask, offsets, torch.tensor([0, 0, 1]), 2)
    tensor([2., 2., 1.], dtype=torch.float64)
    """
    return trained_tokens(mask, offsets, index, size).clamp(min=1.0)[index]

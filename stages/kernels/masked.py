"""Sums, means and maxima of the trained tokens of each sample, and values spread over tokens."""

from math import isfinite

import torch
from torch import Tensor

from trajreplay.stages.kernels.options import check_option
from trajreplay.stages.kernels.segments import (
    check_segments,
    check_shapes,
    segment_max,
    sum_checked,
)

STATISTICS = ("token", "sum", "mean", "max")


def sample_values(
    values: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    statistic: str = "mean",
    epsilon: float = 0.0,
) -> Tensor:
    """Replace each token by a statistic of the trained tokens of its sample.

        sum: sum_t m_t x_t      max: max_{m_t = 1} x_t      token: x_t
        mean: sum_t m_t x_t / max(sum_t m_t, 1)      or, with epsilon, / (sum_t m_t + epsilon)

    Args:
        values: (N,) float. The tokens of all samples, packed.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        statistic: `token`, `sum`, `mean` or `max`.
        epsilon: What is added to the count of a mean. Token.

    Returns:
        (N,) in the dtype of `values`, masked tokens too. Unit of `values`.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, or the statistic is
            none of these.

    Conventions:
        Sums run in float64; what is masked never enters them. A sample without trained tokens has
        0 in all three (so verl and AReaL in their maxima). slime, Relax, TRL and AReaL divide by
        at least 1; verl and NeMo-RL add an epsilon of 1e-8 instead.

    Source:
        The definition.

    >>> values, offsets = torch.tensor([1.0, 3.0, 8.0, torch.nan]), torch.tensor([0, 2, 4])
    >>> sample_values(values, torch.tensor([1, 1, 1, 0]), offsets)
    tensor([2., 2., 8., 8.])
    """
    check_option("sample_values", "statistic", statistic, STATISTICS)
    if statistic == "token":
        check_shapes("sample_values", values=(values, "N"), mask=(mask, "N"))
        check_segments("sample_values", values, offsets)
        return values.clone()
    if statistic == "max":
        samples = masked_max(values, mask, offsets)
    elif statistic == "sum":
        samples = masked_sum(values, mask, offsets)
    else:
        samples = masked_mean(values, mask, offsets, epsilon=epsilon)
    return spread(samples.to(values.dtype), offsets)


def masked_sum(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Sum the trained tokens of each sample.

    Args:
        values: (N,) bool, integer or float. The tokens of all samples, packed.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        (S,) float64. Unit of `values`. Without trained tokens 0.

    Raises:
        StageError: The inputs differ in length, or `offsets` do not cover them.

    >>> masked_sum(torch.tensor([1.0, torch.nan]), torch.tensor([1, 0]), torch.tensor([0, 2]))
    tensor([1.], dtype=torch.float64)
    """
    check_shapes("masked_sum", values=(values, "N"), mask=(mask, "N"))
    length = check_segments("masked_sum", values, offsets)
    counted, wide = mask.bool(), values.double()
    sums = sum_checked(wide * counted, offsets, length)
    # As in seq_mean_token_mean: a product is cheaper than a choice, but keeps a masked NaN.
    if not isfinite(float(sums.detach().sum())):
        sums = sum_checked(torch.where(counted, wide, 0.0), offsets, length)
    return sums


def masked_mean(values: Tensor, mask: Tensor, offsets: Tensor, *, epsilon: float = 0.0) -> Tensor:
    """Average the trained tokens of each sample.

    Args:
        values: (N,) bool, integer or float. The tokens of all samples, packed.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        epsilon: What is added to the count; if 0, the count is taken as at least 1. Token.

    Returns:
        (S,) float64. Unit of `values`. Without trained tokens 0.

    Raises:
        StageError: As `masked_sum`.

    >>> masked_mean(torch.tensor([1.0, 4.0]), torch.tensor([1, 1]), torch.tensor([0, 2, 2]))
    tensor([2.5000, 0.0000], dtype=torch.float64)
    """
    sums = masked_sum(values, mask, offsets)
    count = masked_sum(torch.ones_like(mask, dtype=torch.bool), mask, offsets)
    return sums / (count + epsilon if epsilon else count.clamp(min=1.0))


def masked_max(values: Tensor, mask: Tensor, offsets: Tensor) -> Tensor:
    """Find the largest trained token of each sample.

    Args:
        values: (N,) bool, integer or float. The tokens of all samples, packed.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        (S,) float64. Unit of `values`. Without trained tokens 0.

    Raises:
        StageError: As `masked_sum`.

    >>> masked_max(torch.tensor([1.0, 4.0]), torch.tensor([1, 0]), torch.tensor([0, 2, 2]))
    tensor([1., 0.], dtype=torch.float64)
    """
    check_shapes("masked_max", values=(values, "N"), mask=(mask, "N"))
    counted = mask.bool()
    largest = segment_max(torch.where(counted, values.double(), -torch.inf), offsets)
    trained = masked_sum(counted, counted, offsets) > 0.0
    return torch.where(trained, largest, 0.0)


def spread(samples: Tensor, offsets: Tensor) -> Tensor:
    """Repeat what each sample has over its tokens.

    Args:
        samples: (S,) any dtype.
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        (N,) in the dtype and unit of `samples`.

    >>> spread(torch.tensor([7, 8]), torch.tensor([0, 2, 3]))
    tensor([7, 7, 8])
    """
    return torch.repeat_interleave(samples, offsets.diff(), output_size=int(offsets[-1]))

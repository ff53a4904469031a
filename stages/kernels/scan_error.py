"""What float32 may change of linear recurrences over the tokens of a sample."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.precision import FLOAT32_ROUNDOFF
from trajreplay.stages.kernels.rounded import Rounded
from trajreplay.stages.kernels.scans import linear_scan, sample_of
from trajreplay.stages.kernels.segments import segment_max
from trajreplay.stages.kernels.step_returns import in_steps

U = FLOAT32_ROUNDOFF
# As `SUM_LAMBDA`, where every step is given four roundings of the largest result. 6 leaves 1e-7
# for a million steps that all round by half an ulp, and covers 9,216 equal terms added one by one.
_LAMBDA = 6.0


class ScanTerms(NamedTuple):
    """(N,) each: the terms of a recurrence, what all of them are off by alike, and one by one.

    A constant that float32 cannot hold shifts all terms the same way; roundings do not conspire.
    """

    value: Tensor
    alike: Tensor
    each: Tensor


def scan_error(
    terms: ScanTerms,
    decay: Tensor,
    decay_error: Tensor,
    offsets: Tensor,
    *,
    reverse: bool = True,
) -> Rounded:
    """Run a linear recurrence, and bound how far a float32 evaluation may lie from it.

        y_t = x_t + a_t y_{t+1}      M = max over the sample |y|
        l_t = e_t + |da_t| M + a_t l_{t+1}      with e what terms are off by alike
        k_t = q_t + a_t k_{t+1}      s_t = q_t^2 + a_t^2 s_{t+1}      with q_t = r_t + 4 u M
        e(y) = l + min(k, lambda sqrt(s))      with r what they are off by one by one

    Args:
        terms: (N,), x.
        decay: (N,) float. a. Dimensionless.
        decay_error: (N,) float, da. What it may be off by.
        offsets: (S+1,) int64. Where each sample begins, and N.
        reverse: From the last token to the first.

    Returns:
        (N,), y and its bound. Unit of `terms`.

    Raises:
        StageError: As `linear_scan`.

    Conventions:
        Token by token, or in blocks whose sums are taken by themselves, since the sum of a block
        is a difference of two y. A token without decay and term adds no rounding. The second half
        of the minimum is a probabilistic bound, as of `accumulation_factor`, with a lambda of 6.

    Source:
        Higham 2002, Accuracy and stability of numerical algorithms, section 3.3 (running error);
        Higham & Mary 2019, doi:10.1137/18M1226312.

    >>> ones, zeros = torch.ones(2).double(), torch.zeros(2).double()
    >>> found = scan_error(ScanTerms(ones, zeros, zeros), ones, zeros, torch.tensor([0, 2]))
    >>> found.value, found.error / 2.0**-24
    (tensor([2., 1.], dtype=torch.float64), tensor([16.,  8.], dtype=torch.float64))
    """
    value = linear_scan(terms.value, decay, offsets, reverse=reverse)
    if not value.numel():
        return Rounded(value, value.clone())
    # What a masked token holds has no effect where its decay is 0 or its term is.
    largest = segment_max(value.abs().nan_to_num(nan=0.0), offsets)[sample_of(offsets)]
    passed = (terms.value == 0.0) & (terms.each == 0.0) & ((decay == 1.0) | (decay == 0.0))
    each = terms.each + torch.where(passed, 0.0, 4.0 * U * largest)
    size = decay.abs()
    # One scan of three times as many samples takes little longer than one of them.
    count = value.numel()
    alike, worst, squares = linear_scan(
        torch.cat([terms.alike + decay_error * largest, each, each**2]),
        torch.cat([size, size, size**2]),
        torch.cat([offsets, offsets[1:] + count, offsets[1:] + 2 * count]),
        reverse=reverse,
    ).split_with_sizes([count] * 3)
    error = alike + torch.minimum(worst, _LAMBDA * squares.sqrt())
    return Rounded(value, torch.where(value.isnan(), torch.nan, error))


def step_returns_error(
    rewards: Rounded, trajectory_index: Tensor, step_index: Tensor, *, gamma: float
) -> Tensor:
    """(S,) The same bound of `step_returns`, whose arguments these are."""
    order, offsets = in_steps(trajectory_index, step_index)
    terms = ScanTerms(rewards.value[order], rewards.error[order], torch.zeros_like(rewards.error))
    decay = torch.full_like(terms.value, gamma)
    result = torch.empty_like(rewards.error)
    result[order] = scan_error(terms, decay, decay_error(decay), offsets).error
    return result


def decay_error(*factors: Tensor) -> Tensor:
    """(N,) float64. What a product of constants may be off by in float32.

        da = sum_k |fl(a_k) - a_k| / |a_k| prod a + u prod a      without the last where all are 1

    >>> decay_error(torch.ones(1).double()), decay_error(torch.tensor([0.9]).double() ** 2) > 0
    (tensor([0.], dtype=torch.float64), tensor([True]))
    """
    product = torch.stack(factors).prod(0)
    relative = torch.zeros_like(product)
    for one in factors:
        relative += torch.where(one.float().double() == one, 0.0, U)
    rounded = U * sum((one != 1.0).double() for one in factors[1:]) if factors[1:] else 0.0
    return product.abs() * (relative + rounded)

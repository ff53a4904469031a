"""Values with a bound on what float32 arithmetic has made of them, and sums of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.stages.kernels.groups import Groups
from trajreplay.stages.kernels.precision import (
    FLOAT32_ROUNDOFF,
    FLOAT32_TINY,
    accumulation_factor,
)

# Numbers on this grid, with absolute values that sum to less than 2^24 steps of it, are added
# without a rounding in any order: 0 and 1, halves, tenths of 2, but not 0.1.
EXACT_STEP = 2.0**-12


@dataclass(frozen=True)
class Rounded:
    """Exact values, and how far those of a float32 evaluation may lie from them.

    Sums, differences, products and quotients carry both on: what the operands may be off by, and
    one rounding of the result.

    Args:
        value: (...) float64.
        error: (...) float64. The same unit.
    """

    value: Tensor
    error: Tensor

    def __add__(self, other: Rounded) -> Rounded:
        return _rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other: Rounded) -> Rounded:
        return _rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other: Rounded) -> Rounded:
        first, second = self.value.abs(), other.value.abs()
        error = first * other.error + second * self.error + self.error * other.error
        return _rounded(self.value * other.value, error)

    def __getitem__(self, index: Tensor) -> Rounded:
        return Rounded(self.value[index], self.error[index])

    def clamped(self, low: float, high: float) -> Rounded:
        """Clip both ends of what a value may be."""
        value = self.value.clamp(low, high)
        above = (self.value + self.error).clamp(low, high) - value
        below = value - (self.value - self.error).clamp(low, high)
        error = torch.maximum(above, below) + constant(low).error + constant(high).error
        return Rounded(value, torch.where(self.error.isnan(), torch.nan, error))

    def where(self, chosen: Tensor, other: Rounded) -> Rounded:
        """These where `chosen`, the others elsewhere."""
        return Rounded(
            torch.where(chosen, self.value, other.value),
            torch.where(chosen, self.error, other.error),
        )


def exactly(values: Tensor) -> Rounded:
    """Values that a trainer has as they are.

    >>> exactly(torch.ones(1)).error
    tensor([0.], dtype=torch.float64)
    """
    return Rounded(values.double(), torch.zeros_like(values, dtype=torch.float64))


def constant(number: float) -> Rounded:
    """A Python number, which float32 may not hold."""
    value = torch.tensor(number, dtype=torch.float64)
    error = (value.float().double() - value).abs()
    return Rounded(value, torch.where(value.isinf(), 0.0, error))


def in_float32(values: Tensor) -> Rounded:
    """Values that a trainer rounds to float32, or keeps."""
    return Rounded(values.double(), (values.float().double() - values.double()).abs())


def quotient(numerator: Rounded, least: Tensor, most: Tensor, value: Tensor) -> Tensor:
    """Bound a quotient whose divisor lies between two positive numbers.

        e = max |y - (x +- e(x)) / d|      over d in {least, most}, and one rounding

    Args:
        numerator: (...), x.
        least: (...) float64. The least the divisor may be.
        most: (...) float64. The most.
        value: (...) float64, y. The exact quotient.

    Returns:
        (...) float64. Where the divisor may be 0, infinite or NaN, unless x is exactly 0.
    """
    ends = numerator.value - numerator.error, numerator.value + numerator.error
    corners = [(value - end / d).abs() for end in ends for d in (least, most)]
    error = torch.stack(corners).amax(0)
    error = error + FLOAT32_ROUNDOFF * (value.abs() + error) + FLOAT32_TINY
    still = (numerator.value == 0.0) & (numerator.error == 0.0) & (least > 0.0)
    return torch.where(still, 0.0, error)


def exact_sums(values: Rounded, groups: Groups) -> Tensor:
    """(G,) Whether each group adds up without a rounding, in whatever order."""
    on_grid = ((values.value / EXACT_STEP).frac() == 0.0) & (values.error == 0.0)
    small = groups.sum(values.value.abs()) < EXACT_STEP * 2.0**24
    one = (groups.size == 1.0) & (groups.sum(values.error) == 0.0)
    return ((groups.least(on_grid.double()) == 1.0) & small) | one


def sum_error(values: Rounded, groups: Groups) -> Tensor:
    """(G,) Bound the float32 sum of each group, any order; tighter where it is exact."""
    size = groups.sum(values.value.abs())
    inherited = groups.sum(values.error)
    rounding = accumulation_factor(groups.size - 1.0) * (size + inherited)
    return inherited + torch.where(exact_sums(values, groups), 0.0, rounding)


def mean_error(values: Rounded, groups: Groups) -> Tensor:
    """(G,) Bound the float32 mean of each group, tighter where its sum or all of it is exact."""
    size = groups.sum(values.value.abs())
    # A division by a power of two is exact; another one may be a product with 1/n.
    power_of_two = torch.frexp(groups.size).mantissa == 0.5
    division = torch.where(power_of_two, 0.0, 2.0 * FLOAT32_ROUNDOFF) * size
    inherited = groups.sum(values.error)
    summed = inherited + accumulation_factor(groups.size + 1.0) * (size + inherited)
    return torch.where(exact_sums(values, groups), division, summed) / groups.size


def _rounded(value: Tensor, error: Tensor) -> Rounded:
    # The rounding of an exact result is known; of another one only its size is.
    known = (value.float().double() - value).abs()
    rounding = FLOAT32_ROUNDOFF * (value.abs() + error) + FLOAT32_TINY
    return Rounded(value, error + torch.where(error == 0.0, known, rounding))

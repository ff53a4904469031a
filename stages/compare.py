"""Recorded against recomputed: what agrees, what agrees within a bound, and what does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from trajreplay.schema.policy import Tolerance
from trajreplay.stages.report import Divergence, StageVerdict

EXAMPLES = 10


@dataclass
class Look:
    """How one cohort's recorded values compare with recomputed ones.

    Args:
        compared: Values compared.
        mismatches: Values beyond every bound.
        undecided: Values beyond the tolerance and inside the bound computed from the data.
        max_abs_error: Largest |recorded - recomputed|, NaN where one is not finite.
        divergences: The first mismatches.
    """

    compared: int = 0
    mismatches: int = 0
    undecided: int = 0
    max_abs_error: float = 0.0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def verdict(self) -> StageVerdict:
        """diverged, precision or pass."""
        return "diverged" if self.mismatches else "precision" if self.undecided else "pass"

    def merged(self, other: Look) -> Look:
        """Both looks as one."""
        mine, theirs = self.max_abs_error, other.max_abs_error
        return Look(
            self.compared + other.compared,
            self.mismatches + other.mismatches,
            self.undecided + other.undecided,
            mine if mine != mine or mine > theirs else theirs,
            (self.divergences + other.divergences)[:EXAMPLES],
        )


@dataclass(frozen=True)
class Compared:
    """The looks of all cohorts of a block, and the elements that disagree (None if none does)."""

    looks: list[Look]
    disagree: Tensor | None


@dataclass(frozen=True)
class Active:
    """The elements that count.

    Args:
        chosen: (E,) bool.
        weights: (E,) float64. 1 where `chosen`, else 0.
        counts: How many count in each cohort.
    """

    chosen: Tensor
    weights: Tensor
    counts: Sequence[int]


def compare_elements(
    recorded: Tensor,
    recomputed: Tensor,
    bounds: Sequence[int],
    tolerance: Tolerance,
    *,
    slack: Callable[[Tensor], Tensor],
    describe: Callable[[int, float, float], Divergence],
    active: Active | None = None,
) -> Compared:
    """Compare two tensors element by element, cohort by cohort.

    Args:
        recorded: (E,) float64.
        recomputed: (E,) float64.
        bounds: Where the elements of each cohort begin, and E at the end.
        tolerance: What is a pass.
        slack: From element numbers to the bounds inside which a difference is precision.
        describe: From an element number, recorded and recomputed value to the divergence.
        active: Elements that count; None if all do.

    Returns:
        A look per cohort. A NaN or an infinity never agrees, not even with itself.
    """
    error = (recorded - recomputed).abs_()
    if active is not None:
        error.mul_(active.weights)  # a quarter of the cost of a choice; sees to NaN below
    largest = _largest(error, bounds)
    # Where even the largest error is within atol, no limit has to be made of the values.
    close = all(one <= tolerance.atol for one in largest)
    outside = None if close else _outside(error, recomputed, tolerance, active)
    if outside is not None and active is not None:
        largest = _largest(error, bounds)
    counts = [stop - start for start, stop in pairwise(bounds)] if active is None else active.counts
    looks = [
        Look(compared=count, max_abs_error=one) for count, one in zip(counts, largest, strict=True)
    ]
    if outside is None or not len(outside):
        return Compared(looks, None)
    inside_bound = (error[outside] <= slack(outside)) & (error[outside] < torch.inf)
    differing = outside[~inside_bound]
    edges = torch.tensor(bounds[1:])
    for index in torch.searchsorted(edges, outside[inside_bound], right=True).tolist():
        looks[index].undecided += 1
    owners = torch.searchsorted(edges, differing, right=True)
    for index in sorted(set(owners.tolist())):
        mine = differing[owners == index]
        looks[index].mismatches = len(mine)
        looks[index].divergences = [
            describe(one, float(recorded[one]), float(recomputed[one]))
            for one in mine[:EXAMPLES].tolist()
        ]
    if not len(differing):
        return Compared(looks, None)
    disagree = torch.zeros(len(recorded), dtype=torch.bool)
    disagree[differing] = True
    return Compared(looks, disagree)


def _largest(error: Tensor, bounds: Sequence[int]) -> list[float]:
    """The largest error of each cohort, NaN where one is NaN and 0 without elements."""
    counts = {stop - start for start, stop in pairwise(bounds)}
    if len(counts) == 1 and (count := counts.pop()):
        found: list[float] = error.view(-1, count).amax(1).tolist()
        return found
    return [
        float(error[start:stop].amax()) if start < stop else 0.0 for start, stop in pairwise(bounds)
    ]


def _outside(
    error: Tensor, recomputed: Tensor, tolerance: Tolerance, active: Active | None
) -> Tensor:
    """(K,) int64. Elements beyond the tolerance; errors of those that do not count become 0."""
    if active is not None:
        error.masked_fill_(~active.chosen, 0.0)
    limit = recomputed.abs().mul_(tolerance.rtol).add_(tolerance.atol)
    # A NaN fails the first comparison; an infinite difference fails the second.
    within = (error <= limit).logical_and_(error < torch.inf)
    if active is not None:
        within.logical_or_(~active.chosen)
    return (~within).nonzero().squeeze(1)


def compare_scalar(
    divergence: Divergence, tolerance: Tolerance, slack: Callable[[], float]
) -> Look:
    """Compare one recorded scalar with the recomputed one that `divergence` holds beside it."""
    error = divergence.abs_error
    look = Look(compared=1, max_abs_error=error)
    if error <= tolerance.atol + tolerance.rtol * abs(divergence.recomputed) and error < torch.inf:
        return look
    if error <= slack() and error < torch.inf:
        look.undecided = 1
    else:
        look.mismatches, look.divergences = 1, [divergence]
    return look

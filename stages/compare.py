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
        accepted: Values beyond both that a looser tolerance accepts, which was asked for.
        inexact: Values within the tolerance without the bits that were asked for.
        max_abs_error: Largest |recorded - recomputed|, NaN where one is not finite.
        divergences: The first mismatches.
        ranks: The ranks of all of them, as far as they are of some.
    """

    compared: int = 0
    mismatches: int = 0
    undecided: int = 0
    max_abs_error: float = 0.0
    divergences: list[Divergence] = field(default_factory=list)
    accepted: int = 0
    inexact: int = 0
    ranks: frozenset[int] = frozenset()

    @property
    def verdict(self) -> StageVerdict:
        """diverged, precision or pass."""
        if self.mismatches:
            return "diverged"
        return "precision" if self.undecided or self.accepted or self.inexact else "pass"

    def merged(self, other: Look) -> Look:
        """Both looks as one."""
        mine, theirs = self.max_abs_error, other.max_abs_error
        return Look(
            self.compared + other.compared,
            self.mismatches + other.mismatches,
            self.undecided + other.undecided,
            mine if mine != mine or mine > theirs else theirs,
            (self.divergences + other.divergences)[:EXAMPLES],
            self.accepted + other.accepted,
            self.inexact + other.inexact,
            self.ranks | other.ranks,
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
        left_out: (K,) int64. The elements that do not count.
        counts: How many count in each cohort.
    """

    left_out: Tensor
    counts: Sequence[int]


def compare_elements(
    recorded: Tensor,
    recomputed: Tensor,
    bounds: Sequence[int],
    tolerance: Tolerance,
    *,
    slack: Callable[[Tensor], Tensor],
    describe: Callable[[int, float, float], Divergence],
    ranks: Callable[[Tensor], frozenset[int]],
    active: Active | None = None,
    exact: Tensor | None = None,
) -> Compared:
    """Compare two tensors element by element, cohort by cohort.

    Args:
        recorded: (E,) float64.
        recomputed: (E,) float64.
        bounds: Where the elements of each cohort begin, and E at the end.
        tolerance: What is a pass.
        slack: From element numbers to the bounds inside which a difference is precision.
        describe: From an element number, recorded and recomputed value to the divergence.
        ranks: From element numbers to the ranks that they are of.
        active: Elements that count; None if all do.
        exact: (E,) float64. The bits that a pass must have; None where any will do.

    Returns:
        A look per cohort. A NaN or an infinity never agrees, not even with itself.
    """
    error = (recorded - recomputed).abs_()
    if active is not None:
        error.index_fill_(0, active.left_out, 0.0)  # few, as a rule; their NaN never enters
    largest = _largest(error, bounds)
    # Where even the largest error is within atol, no limit has to be made of the values.
    close = all(one <= tolerance.atol for one in largest)
    outside = None if close else _outside(error, recomputed, tolerance)
    counts = [stop - start for start, stop in pairwise(bounds)] if active is None else active.counts
    looks = [
        Look(compared=count, max_abs_error=one) for count, one in zip(counts, largest, strict=True)
    ]
    if exact is not None:
        _count_inexact(looks, recorded != exact, bounds, outside, active)
    if outside is None or not len(outside):
        return Compared(looks, None)
    inside_bound = (error[outside] <= slack(outside)) & (error[outside] < torch.inf)
    differing = outside[~inside_bound]
    edges = torch.tensor(bounds[1:])
    if tolerance.accepted is not None:
        limit = recomputed[differing].abs() * tolerance.accepted.rtol + tolerance.accepted.atol
        within = (error[differing] <= limit) & (error[differing] < torch.inf)
        for index in torch.searchsorted(edges, differing[within], right=True).tolist():
            looks[index].accepted += 1
        differing = differing[~within]
    for index in torch.searchsorted(edges, outside[inside_bound], right=True).tolist():
        looks[index].undecided += 1
    owners = torch.searchsorted(edges, differing, right=True)
    for index in sorted(set(owners.tolist())):
        mine = differing[owners == index]
        looks[index].mismatches = len(mine)
        looks[index].ranks = ranks(mine)
        looks[index].divergences = [
            describe(one, float(recorded[one]), float(recomputed[one]))
            for one in mine[:EXAMPLES].tolist()
        ]
    if not len(differing):
        return Compared(looks, None)
    disagree = torch.zeros(len(recorded), dtype=torch.bool)
    disagree[differing] = True
    return Compared(looks, disagree)


def _count_inexact(
    looks: list[Look],
    other: Tensor,
    bounds: Sequence[int],
    outside: Tensor | None,
    active: Active | None,
) -> None:
    """Count, of each cohort, elements within the tolerance that have other bits."""
    if active is not None:
        other = other.index_fill(0, active.left_out, False)
    if outside is not None:
        other = other.index_fill(0, outside, False)
    for look, (start, stop) in zip(looks, pairwise(bounds), strict=True):
        look.inexact = int(torch.count_nonzero(other[start:stop]))


def _largest(error: Tensor, bounds: Sequence[int]) -> list[float]:
    """The largest error of each cohort, NaN where one is NaN and 0 without elements."""
    counts = {stop - start for start, stop in pairwise(bounds)}
    if len(counts) == 1 and (count := counts.pop()):
        found: list[float] = error.view(-1, count).amax(1).tolist()
        return found
    return [
        float(error[start:stop].amax()) if start < stop else 0.0 for start, stop in pairwise(bounds)
    ]


def _outside(error: Tensor, recomputed: Tensor, tolerance: Tolerance) -> Tensor:
    """(K,) int64. Elements beyond the tolerance."""
    return beyond(error, recomputed, tolerance).nonzero().squeeze(1)


def beyond(error: Tensor, recomputed: Tensor, tolerance: Tolerance) -> Tensor:
    """(E,) bool. Whether elements are beyond the tolerance; an error of 0 never is."""
    limit = recomputed.abs().mul_(tolerance.rtol).add_(tolerance.atol)
    # A NaN fails the first comparison; an infinite difference fails the second.
    within = (error <= limit).logical_and_(error < torch.inf).logical_or_(error == 0.0)
    return within.logical_not_()


def compare_scalar(
    divergence: Divergence,
    tolerance: Tolerance,
    slack: Callable[[], float],
    exact: float | None = None,
) -> Look:
    """Compare one recorded scalar with the recomputed one that `divergence` holds beside it.

    Args:
        divergence: Both values.
        tolerance: What is a pass.
        slack: Gives the bound inside which a difference is precision.
        exact: The very value that a pass must have; None where any will do.
    """
    error = divergence.abs_error if divergence.abs_error < torch.inf else torch.nan
    look, size = Look(compared=1, max_abs_error=divergence.abs_error), abs(divergence.recomputed)
    accepted = tolerance.accepted
    if error <= tolerance.atol + tolerance.rtol * size:
        look.inexact = int(exact is not None and exact != divergence.recorded)
    elif error <= slack():
        look.undecided = 1
    elif accepted is not None and error <= accepted.atol + accepted.rtol * size:
        look.accepted = 1
    else:
        look.mismatches, look.divergences = 1, [divergence]
        look.ranks = frozenset() if divergence.rank is None else frozenset([divergence.rank])
    return look

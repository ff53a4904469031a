"""How many tokens a router gives the dummy route 0, 1, 2, ... in every layer, by chance."""

from __future__ import annotations

import math
from collections.abc import Iterable

# What a router of equal chances makes with a smaller probability, it did not make.
_LIMIT = math.log(1e-3)


def are_lost(samples: Iterable[tuple[float, int]]) -> bool:
    """Whether some sample has more tokens with the dummy route than a router makes by chance.

        P(X_i >= counted_i) * sum_j expected_j / expected_i < 1e-3        X_i ~ Poisson(expected_i)

    Samples are judged one by one, each with a share of the error that is proportional to what is
    expected of it. So the error holds however samples hang together: those of one prompt have its
    routes in common, and a sample is replayed by several passes. Of a single dummy it is the
    expectation over all samples that decides.

    Args:
        samples: Of each, how many such tokens chance makes on average, and how many there are.

    Conventions:
        The tail is bounded from above by a geometric series, so that rounding refuses nothing.
        Where nothing is expected, one is too many.

    Source:
        Boole's inequality over samples; the Poisson tail bounds that of a sum of independent
        events from above (Anderson and Samuels 1967, from one above the mean on).

    >>> are_lost([(0.7, 3)]), are_lost([(0.7, 7)]), are_lost([(1e-9, 1), (1e-9, 0)])
    (False, True, True)
    """
    known = list(samples)
    total = math.fsum(expected for expected, _ in known)
    return any(
        expected == 0 or _log_tail(expected, counted) + math.log(total / expected) < _LIMIT
        for expected, counted in known
        if counted
    )


def _log_tail(expected: float, counted: int) -> float:
    """An upper bound of log P(X >= counted), whose terms shrink by expected / (counted + 1)."""
    if counted <= expected:
        return 0.0
    first = counted * math.log(expected) - expected - math.lgamma(counted + 1)
    return min(0.0, first - math.log1p(-expected / (counted + 1)))


def chance_of_dummy(experts: int, shape: tuple[int, int]) -> float:
    """How probable it is that a router of equal chances makes a token a dummy.

    Args:
        experts: Experts of a layer.
        shape: Layers, and choices in each.

    >>> round(1 / chance_of_dummy(8, (2, 2)))
    3136
    """
    layers, top_k = shape
    if experts < top_k:
        return 0.0
    return math.exp(-layers * (math.lgamma(experts + 1) - math.lgamma(experts - top_k + 1)))

"""How many tokens a router gives the dummy route 0, 1, 2, ... in every layer, by chance."""

from __future__ import annotations

import math
from collections.abc import Iterable

# What a router of equal chances makes with a smaller probability, it did not make.
_LIMIT = math.log(1e-3)
# In so few layers a router that prefers the first experts gives whole samples the dummy route.
FEW_LAYERS = 2


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


def chance_of_dummy(experts: int, top_k: int, layers: Iterable[tuple[int, int]]) -> float:
    """How probable it is that a router makes a token a dummy, in all layers by chance.

        prod_l max((E - K)! / E!, (k_l + 2 sqrt(k_l)) / n_l)

    A router of equal chances gives the first factor. One that prefers the first experts shows it,
    layer by layer, in the tokens that have another route elsewhere: tokens that lost theirs are
    none of these.

    Args:
        experts: Experts of a layer.
        top_k: Choices of a token.
        layers: Of each, how many of the tokens that have another route in some other layer have
            the dummy route there, k_l, and how many such tokens there are, n_l.

    Conventions:
        Two standard deviations of a count are added. Without such tokens chances are equal.

    >>> round(1 / chance_of_dummy(8, 2, [(0, 0), (0, 50)]))
    3136
    >>> round(chance_of_dummy(8, 2, [(25, 100), (0, 50)]), 6)
    0.00625
    """
    if experts < top_k:
        return 0.0
    equal = math.exp(math.lgamma(experts - top_k + 1) - math.lgamma(experts + 1))
    return math.prod(
        max(equal, min(1.0, (dummies + 2 * math.sqrt(dummies)) / tokens) if tokens else 0.0)
        for dummies, tokens in layers
    )

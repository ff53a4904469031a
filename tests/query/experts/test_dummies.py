"""Routes that were lost are told from those that chance makes, and chance is never refused."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.query.experts.dummies import are_lost, chance_of_dummy

CHANCES = [
    chance_of_dummy(experts, top_k, [(0, 0)] * layers)
    for experts, layers, top_k in ((8, 1, 1), (8, 2, 1), (8, 2, 2), (16, 3, 1))
]


def tail(expected: float, counted: int) -> float:
    """P(X >= counted) of a Poisson variable, term by term."""
    terms = (
        math.exp(number * math.log(expected) - expected - math.lgamma(number + 1))
        for number in range(counted, counted + 400)
    )
    return math.fsum(terms)


@given(st.floats(1e-12, 50), st.integers(1, 120))
def test_one_sample_is_lost_where_the_tail_of_its_count_is_below_a_thousandth(
    expected: float, counted: int
) -> None:
    exact = tail(expected, counted)
    lost = are_lost([(expected, counted)])
    if exact >= 1e-3:
        assert not lost
    if exact < 1e-4:
        assert lost


@given(
    st.lists(st.tuples(st.floats(1e-9, 20), st.integers(0, 40)), min_size=1, max_size=6),
    st.integers(0, 5),
)
def test_more_dummies_never_make_it_less_sure(samples: list[tuple[float, int]], which: int) -> None:
    """Nor does the order of samples matter."""
    lost = are_lost(samples)
    assert are_lost(samples[::-1]) == lost
    place = which % len(samples)
    expected, counted = samples[place]
    more = [*samples[:place], (expected, counted + 1), *samples[place + 1 :]]
    assert are_lost(more) or not lost


@given(st.floats(1e-15, 9e-4), st.integers(1, 50))
def test_a_single_dummy_is_lost_where_all_samples_together_expect_less_than_a_thousandth(
    total: float, samples: int
) -> None:
    shares = [(total * (1 + number), 0) for number in range(samples)]
    whole = sum(expected for expected, _ in shares) / total
    known = [(expected / whole, counted) for expected, counted in shares]
    known[-1] = (known[-1][0], 1)
    assert are_lost(known)
    assert not are_lost([(expected * 2e-3 / total, counted) for expected, counted in known])


@pytest.mark.parametrize("chance", CHANCES)
@pytest.mark.parametrize("shared", [1, 8], ids=["apart", "of one prompt"])
def test_a_router_is_refused_no_more_often_than_stated(chance: float, shared: int) -> None:
    """Also where samples have all their tokens, and so their dummies, in common."""
    random = np.random.default_rng(7)
    refused = 0
    for trial in range(4000):
        lengths = random.integers(1, (40, 400, 4000)[trial % 3], 6)
        counts = random.binomial(lengths, chance)
        samples = [
            (chance * length, count)
            for length, count in zip(lengths.tolist(), counts.tolist(), strict=True)
            for _ in range(shared)
        ]
        refused += are_lost(samples)
    assert refused <= 4  # one in a thousand


def test_nothing_is_lost_of_nothing_and_where_none_can_be_one_is_too_many() -> None:
    assert not are_lost([])
    assert not are_lost([(0.0, 0), (0.5, 0)])
    assert are_lost([(0.0, 1)])

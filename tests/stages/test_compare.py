import math
from itertools import pairwise

import pytest
import torch

from trajreplay.schema import Tolerance
from trajreplay.stages import Divergence
from trajreplay.stages.compare import (
    EXAMPLES,
    Active,
    Compared,
    Look,
    compare_elements,
    compare_scalar,
)

TOLERANCE = Tolerance(1e-6, 1e-5)


def _compared(
    recorded: list[float],
    recomputed: list[float],
    bounds: list[int] | None = None,
    *,
    slack: float = 0.0,
    active: list[bool] | None = None,
    tolerance: Tolerance = TOLERANCE,
) -> Compared:
    bounds = bounds or [0, len(recorded)]
    return compare_elements(
        torch.tensor(recorded, dtype=torch.float64),
        torch.tensor(recomputed, dtype=torch.float64),
        bounds,
        tolerance,
        slack=lambda outside: torch.full((len(outside),), slack, dtype=torch.float64),
        describe=lambda at, old, new: Divergence(str(at), old, new),
        ranks=lambda at: frozenset((at % 3).tolist()),
        active=None if active is None else _active(active, bounds),
    )


def _active(chosen: list[bool], bounds: list[int]) -> Active:
    mask = torch.tensor(chosen, dtype=torch.bool)
    counts = [sum(chosen[start:stop]) for start, stop in pairwise(bounds)]
    return Active((~mask).nonzero().squeeze(1), counts)


def test_the_ranks_of_all_that_differ_are_kept_beyond_the_first_ten() -> None:
    wrong = [1.0] * 40
    looks = _compared(wrong, [0.0, *[2.0] * 39], [0, 1, 1, 40]).looks
    assert [one.ranks for one in looks] == [frozenset({0}), frozenset(), frozenset({0, 1, 2})]
    assert looks[0].merged(looks[2]).ranks == {0, 1, 2}
    (right,) = _compared(wrong, wrong).looks
    assert right.ranks == frozenset()


def test_a_difference_within_the_tolerance_is_a_pass() -> None:
    edge = 1e-6 + 1e-5 * 2.0
    (look,) = _compared([2.0, 2.0 + edge * 0.999], [2.0, 2.0]).looks
    assert (look.verdict, look.compared) == ("pass", 2)
    (look,) = _compared([2.0 + edge * 1.001], [2.0]).looks
    assert look.verdict == "diverged"


def test_a_difference_within_the_bound_is_precision() -> None:
    (look,) = _compared([2.5, 3.5], [2.0, 2.0], slack=1.0).looks
    assert (look.undecided, look.mismatches) == (1, 1)
    assert look.verdict == "diverged"
    (look,) = _compared([2.5], [2.0], slack=0.5).looks
    assert look.verdict == "precision"


def test_a_bound_that_is_no_number_excuses_nothing() -> None:
    (look,) = _compared([2.5], [2.0], slack=math.nan).looks
    assert look.verdict == "diverged"


@pytest.mark.parametrize("recorded", [math.nan, math.inf, -math.inf, 1.0])
@pytest.mark.parametrize("recomputed", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_agrees_with_nothing(recorded: float, recomputed: float) -> None:
    for pair in ((recorded, recomputed), (recomputed, recorded)):
        (look,) = _compared([pair[0]], [pair[1]], slack=1e300).looks
        assert look.verdict == "diverged"
        assert not math.isfinite(look.max_abs_error)
        scalar = compare_scalar(Divergence("x", *pair), TOLERANCE, lambda: 1e300)
        assert scalar.verdict == "diverged"


def test_elements_that_do_not_count_are_not_looked_at() -> None:
    found = _compared([math.nan, 1.0, 9.0], [1.0, 1.0, 1.0], active=[False, True, False])
    assert found.disagree is None
    (look,) = found.looks
    assert (look.verdict, look.compared, look.max_abs_error) == ("pass", 1, 0.0)


def test_each_cohort_has_its_own_look() -> None:
    found = _compared([1.0, 5.0, 1.0, 7.0, 1.1], [1.0] * 5, [0, 1, 1, 3, 5], slack=0.2)
    assert [one.compared for one in found.looks] == [1, 0, 2, 2]
    assert [one.verdict for one in found.looks] == ["pass", "pass", "diverged", "diverged"]
    assert [one.undecided for one in found.looks] == [0, 0, 0, 1]
    assert [one.max_abs_error for one in found.looks] == [0.0, 0.0, 4.0, 6.0]
    assert found.looks[2].divergences == [Divergence("1", 5.0, 1.0)]
    assert found.disagree is not None
    assert found.disagree.tolist() == [False, True, False, True, False]


def test_the_first_mismatches_are_told_and_all_are_counted() -> None:
    (look,) = _compared([2.0] * 30, [1.0] * 30).looks
    assert look.mismatches == 30
    assert [one.field for one in look.divergences] == [str(at) for at in range(EXAMPLES)]


def test_nothing_to_compare_is_no_mismatch() -> None:
    found = _compared([], [], [0, 0])
    assert (found.looks[0].compared, found.disagree) == (0, None)


def test_looks_add_up() -> None:
    first = Look(2, 1, 0, 0.5, [Divergence("a", 1.0, 0.0)])
    second = Look(3, 0, 1, math.nan)
    both = first.merged(second)
    assert (both.compared, both.mismatches, both.undecided) == (5, 1, 1)
    assert math.isnan(both.max_abs_error)
    assert math.isnan(second.merged(first).max_abs_error)
    assert both.verdict == "diverged"


def test_a_scalar_is_judged_as_an_element_is() -> None:
    near = compare_scalar(Divergence("x", 1.0 + 1e-7, 1.0), TOLERANCE, lambda: 0.0)
    bound = compare_scalar(Divergence("x", 1.1, 1.0), TOLERANCE, lambda: 0.2)
    far = compare_scalar(Divergence("x", 1.1, 1.0), TOLERANCE, lambda: 0.05)
    unknown = compare_scalar(Divergence("x", 1.1, 1.0), TOLERANCE, lambda: math.nan)
    assert [one.verdict for one in (near, bound, far, unknown)] == [
        "pass",
        "precision",
        "diverged",
        "diverged",
    ]
    assert far.divergences == [Divergence("x", 1.1, 1.0)]

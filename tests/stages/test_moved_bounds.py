"""Bounds of losses moved by what rounding may move them."""

from math import inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.schema import LossSettings
from trajreplay.stages.compose import SHARE, moved_bounds

ENDS = st.floats(-10.0, 10.0)
INTERVALS = st.one_of(
    st.tuples(st.just(-inf), ENDS),
    st.tuples(ENDS, st.just(inf)),
    st.tuples(ENDS, st.floats(1e-3, 5.0)).map(lambda pair: (pair[0], sum(pair))),
)


@given(INTERVALS, st.sampled_from([SHARE, -SHARE]))
def test_every_finite_end_moves_and_no_infinite_one_does(
    bounds: tuple[float, float], share: float
) -> None:
    settings = LossSettings(
        rejection={"token-k3": bounds}, correction="icepop", correction_bounds=bounds
    )
    moved = moved_bounds(settings, 0.0, share)
    for found in (moved.rejection["token-k3"], moved.correction_bounds):
        assert found is not None
        for old, new, outward in zip(bounds, found, (-1.0, 1.0), strict=True):
            if isfinite(old):
                step = outward * (new - old)
                assert step * share > 0.0
                assert step == pytest.approx(share * (1.0 + abs(old)), rel=1e-6)
            else:
                assert new == old


def test_bounds_that_would_cross_stay() -> None:
    settings = LossSettings(rejection={"token-ratio": (1.0, 1.0)})
    assert moved_bounds(settings, 0.0, -SHARE).rejection == settings.rejection

"""Exact quantiles: those of the whole sorted column, wherever a sample says to look."""

import math

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.query.mismatch import quantiles
from trajreplay.query.mismatch.quantiles import exact_quantiles

WANTED = [0.0, 0.5, 0.99, 0.999, 1.0]


def _drawn(values: np.ndarray, wanted: list[float]) -> tuple[list[float], list[float]]:
    with duckdb.connect() as connection:
        connection.register("given", pa.table({"a": values}))
        connection.execute("CREATE TABLE kept AS SELECT a FROM given")
        found = exact_quantiles(connection, "kept", "a", wanted)
        plain = connection.execute(f"SELECT quantile_cont(a, {wanted}) FROM kept").fetchall()
    return found, plain[0][0]


def _assert_same(found: list[float], plain: list[float]) -> None:
    for one, other in zip(found, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-15, nan_ok=True)


@pytest.mark.parametrize("shape", ["drawn", "constant", "drifting", "sorted", "infinite", "nan"])
def test_quantiles_of_a_large_column_are_those_of_the_sorted_one(shape: str) -> None:
    random = np.random.default_rng(0)
    values = np.abs(random.standard_normal(400_001))
    if shape == "constant":
        values[:] = 0.25
    elif shape == "drifting":
        values *= np.linspace(0.01, 100, len(values))
    elif shape == "sorted":
        values.sort()
    elif shape == "infinite":
        values[::50] = math.inf
    elif shape == "nan":
        values[::3] = math.nan
    _assert_same(*_drawn(values, WANTED))


@given(
    st.lists(st.floats(0, 1e6) | st.just(math.nan), min_size=1, max_size=60),
    st.lists(st.floats(0, 1), min_size=1, max_size=4),
)
def test_the_bracket_changes_no_quantile(values: list[float], wanted: list[float]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(quantiles, "_WHOLE", 1)
        patched.setattr(quantiles, "_SAMPLED", 0.5)
        _assert_same(*_drawn(np.array(values), wanted))

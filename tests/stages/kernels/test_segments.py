import math
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels import (
    check_segments,
    check_shapes,
    scatter_sum,
    segment_max,
    segment_sum,
)

VALUES = pools(float32s(-100.0, 100.0))


def split(values: torch.Tensor, rows: Packed) -> list[list[float]]:
    tokens = iter(values.tolist())
    return [list(islice(tokens, length)) for length in rows.lengths]


@given(packed(), VALUES)
def test_sums_means_and_maxima_equal_a_loop_over_samples(rows: Packed, pool: list[float]) -> None:
    values = rows.tensor(pool)
    samples = split(values, rows)
    expected = [math.fsum(sample) for sample in samples]
    torch.testing.assert_close(segment_sum(values, rows.offsets).tolist(), expected)
    largest = [max(sample, default=-math.inf) for sample in samples]
    assert segment_max(values, rows.offsets).tolist() == largest


@pytest.mark.parametrize("lengths", [[2, 2], [1, 3]])
def test_a_large_or_undefined_value_stays_in_its_sample(lengths: list[int]) -> None:
    rows = Packed(lengths, [1] * 4)
    for bad in (math.nan, math.inf, 1e300):
        values = torch.tensor([bad, 0.1, 0.2, 0.3], dtype=torch.float64)
        clean = math.fsum(values.tolist()[-lengths[1] :]) if lengths == [2, 2] else 0.1 + 0.2 + 0.3
        assert segment_sum(values, rows.offsets)[1].item() == pytest.approx(clean, rel=1e-15)


def test_float32_is_summed_in_float64_and_kept() -> None:
    values = torch.tensor([1.0] + [2.0**-24] * 8)
    for offsets in ([0, 9], [0, 0, 9]):
        sums = segment_sum(values, torch.tensor(offsets))
        assert sums.dtype == torch.float32
        assert sums[-1].item() == 1.0 + 2.0**-21


def test_bools_and_integers_are_counted_in_float64() -> None:
    values = torch.tensor([True, True, False])
    sums = segment_sum(values, torch.tensor([0, 1, 3]))
    assert sums.dtype == torch.float64
    assert sums.tolist() == [1.0, 1.0]


def test_nan_is_the_maximum_of_its_sample() -> None:
    values = torch.tensor([1.0, math.nan, 2.0])
    largest = segment_max(values, torch.tensor([0, 2, 3])).tolist()
    assert math.isnan(largest[0])
    assert largest[1] == 2.0


@given(st.lists(st.tuples(float32s(-100.0, 100.0), st.integers(0, 4)), max_size=30))
def test_scattered_sums_equal_a_loop_over_indices(pairs: list[tuple[float, int]]) -> None:
    values = torch.tensor([value for value, _ in pairs], dtype=torch.float64)
    index = torch.tensor([where for _, where in pairs], dtype=torch.int64)
    expected = [math.fsum(value for value, where in pairs if where == k) for k in range(5)]
    torch.testing.assert_close(scatter_sum(values, index, 5).tolist(), expected)


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(StageError, match="runs from 0 to 2, expected 0 to 1"):
        scatter_sum(torch.ones(2), torch.tensor([0, 2]), 2)


@pytest.mark.parametrize("offsets", [[], [0], [0, 2], [1, 3], [0, 4, 3], [0, 2, 1, 3]])
def test_offsets_that_do_not_cover_the_tokens_are_refused(offsets: list[int]) -> None:
    with pytest.raises(StageError, match="offsets do not rise from 0 to 3"):
        segment_sum(torch.ones(3), torch.tensor(offsets, dtype=torch.int64))


def test_shapes_are_named_in_one_message() -> None:
    with pytest.raises(StageError, match="a has 2 axes, expected 1; c has 3 along N, expected 2"):
        check_shapes(
            "demo", a=(torch.ones(1, 1), "N"), b=(torch.ones(2), "N"), c=(torch.ones(3), "N")
        )


@pytest.mark.parametrize(("offsets", "length"), [([0, 2, 4], 2), ([0, 1, 4], 0), ([0, 4], 4)])
def test_a_common_length_is_found(offsets: list[int], length: int) -> None:
    assert check_segments("demo", torch.ones(4), torch.tensor(offsets)) == length


def test_no_samples_sum_to_nothing() -> None:
    assert segment_sum(torch.ones(0), torch.tensor([0])).tolist() == []
    assert segment_max(torch.ones(0), torch.tensor([0, 0])).tolist() == [-math.inf]

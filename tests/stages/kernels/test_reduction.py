import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import reference_means
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels.counts import shared_tokens, trained_tokens
from trajreplay.stages.kernels.reduction import (
    EMPTY,
    SAMPLES,
    Reduction,
    sequence_mean,
    set_mean,
    token_mean,
)

VALUES = pools(float32s(-100.0, 100.0), size=15)

G14 = torch.tensor([1.0, 2, 3, 4, 10, 20, math.nan, 0, 5, 0, 0, math.nan])
G14_MASK = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
G14_OFFSETS = torch.tensor([0, 4, 8, 12])
STEP = torch.zeros(3, dtype=torch.int64)


def dealt(rows: Packed) -> Tensor:
    """Three sets of samples, the last of them empty."""
    return torch.arange(len(rows.lengths)) % 2


def check(found: Reduction, expected: list[tuple[float, float]], empty: str) -> None:
    nothing = 0.0 if empty == "zero" else math.nan
    values = [above / below if below else nothing for above, below in expected]
    assert found.numerator.tolist() == pytest.approx([one[0] for one in expected], abs=1e-10)
    assert found.denominator.tolist() == [one[1] for one in expected]
    assert found.value.tolist() == pytest.approx(values, abs=1e-10, nan_ok=True)


@given(empty=st.sampled_from(EMPTY), rows=packed(max_samples=4, max_tokens=9), pool=VALUES)
def test_the_token_mean_equals_a_loop_over_sets(
    empty: str, rows: Packed, pool: list[float]
) -> None:
    values, index = rows.tensor(pool), dealt(rows)
    found = token_mean(values, rows.mask, rows.offsets, index, 3, empty=empty)
    expected = reference_means.token_mean(
        values.tolist(), rows.loss_mask, rows.lengths, index.tolist(), 3
    )
    check(found, expected, empty)
    counts = trained_tokens(rows.mask, rows.offsets, index, 3)
    assert counts.tolist() == [one[1] for one in expected]


@pytest.mark.parametrize("samples", SAMPLES)
@given(
    empty=st.sampled_from(EMPTY),
    rows=packed(max_samples=4, max_tokens=9),
    pool=VALUES,
    shared=st.booleans(),
)
def test_the_mean_of_samples_equals_a_loop_over_sets(
    samples: str, empty: str, rows: Packed, pool: list[float], shared: bool
) -> None:
    values, index = rows.tensor(pool), dealt(rows)
    rollouts = torch.arange(len(rows.lengths)) // 2
    divisor = shared_tokens(rows.mask, rows.offsets, rollouts, 4)
    assert divisor.tolist() == reference_means.shared_tokens(
        rows.loss_mask, rows.lengths, rollouts.tolist()
    )
    found = sequence_mean(
        values,
        rows.mask,
        rows.offsets,
        index,
        3,
        token_denominator=divisor if shared else None,
        samples=samples,
        empty=empty,
    )
    expected = reference_means.sequence_mean(
        values.tolist(),
        rows.loss_mask,
        rows.lengths,
        index.tolist(),
        3,
        token_denominator=divisor.tolist() if shared else None,
        samples=samples,
    )
    check(found, expected, empty)


@given(st.lists(st.tuples(float32s(-9.0, 9.0), st.integers(0, 3), st.integers(0, 2))))
def test_the_mean_of_sets_equals_a_loop(parts: list[tuple[float, int, int]]) -> None:
    values = torch.tensor([one[0] for one in parts], dtype=torch.float64)
    weights = torch.tensor([one[1] for one in parts], dtype=torch.float64)
    index = torch.tensor([one[2] for one in parts], dtype=torch.int64)
    expected = [
        (
            sum(value * weight for value, weight, its in parts if its == number),
            float(sum(weight for _, weight, its in parts if its == number)),
        )
        for number in range(4)
    ]
    check(set_mean(values, index, 4, weights=weights), expected, "zero")
    alike = set_mean(values, index, 4)
    assert alike.denominator.tolist() == [
        float(sum(its == number for _, _, its in parts)) for number in range(4)
    ]


def test_golden_token_means() -> None:
    """G14: over the step, over micro-batches, and over a constant."""
    whole = token_mean(G14, G14_MASK, G14_OFFSETS, STEP, 1)
    assert whole.value.item() == pytest.approx(6.66666651, rel=1e-7)
    assert [whole.numerator.item(), whole.denominator.item()] == [40.0, 6.0]
    parts = token_mean(G14, G14_MASK, G14_OFFSETS, torch.tensor([0, 1, 1]), 2)
    assert parts.value.tolist() == [2.5, 15.0]
    assert set_mean(parts.value, STEP[:2], 1).value.item() == 8.75
    by_tokens = set_mean(parts.value, STEP[:2], 1, weights=parts.denominator)
    assert by_tokens.value.item() == pytest.approx(6.66666651, rel=1e-7)
    for constant, expected in ((4.0, 10.0), (12.0, 3.33333325)):
        divisor = torch.tensor([constant])
        norm = token_mean(G14, G14_MASK, G14_OFFSETS, STEP, 1, denominator=divisor)
        assert norm.value.item() == pytest.approx(expected, rel=1e-7)


def test_golden_means_of_samples() -> None:
    """G14: of two samples or of three, of means or of sums."""
    tokens = G14, G14_MASK, G14_OFFSETS, STEP, 1
    assert sequence_mean(*tokens, samples="trained").value.item() == 8.75
    assert sequence_mean(*tokens).value.item() == pytest.approx(5.83333349, rel=1e-7)
    sums = sequence_mean(*tokens, token_denominator=torch.ones(3), samples="trained")
    assert sums.value.item() == 20.0
    every = sequence_mean(*tokens, token_denominator=torch.ones(3))
    assert every.value.item() == pytest.approx(40.0 / 3.0)
    given_ = sequence_mean(*tokens, denominator=torch.tensor([7.0]))
    assert given_.value.item() == 2.5


def test_fragments_of_a_rollout_share_what_they_are_divided_by() -> None:
    values, mask = torch.tensor([1.0, 2.0, 3.0, 8.0]), torch.ones(4)
    offsets, rollouts = torch.tensor([0, 1, 3, 4]), torch.tensor([0, 0, 1])
    divisor = shared_tokens(mask, offsets, rollouts, 2)
    assert divisor.tolist() == [3.0, 3.0, 1.0]
    found = sequence_mean(
        values,
        mask,
        offsets,
        STEP,
        1,
        token_denominator=divisor,
        denominator=torch.tensor([2.0]),
    )
    assert found.value.item() == 5.0


def test_an_empty_sample_counts_as_one_token_where_asked() -> None:
    counts = trained_tokens(G14_MASK, G14_OFFSETS, STEP, 1, least=1)
    assert counts.tolist() == [7.0]


def test_an_empty_set_is_0_or_nan_or_held_by_epsilon() -> None:
    values, mask, offsets = torch.tensor([math.nan]), torch.zeros(1), torch.tensor([0, 1])
    rest = values, mask, offsets, torch.tensor([0]), 2
    assert token_mean(*rest).value.tolist() == [0.0, 0.0]
    assert token_mean(*rest, empty="nan").value.isnan().all()
    assert token_mean(*rest, epsilon=1e-8, empty="nan").value.tolist() == [0.0, 0.0]
    assert sequence_mean(*rest, samples="trained", empty="nan").value.isnan().all()
    assert sequence_mean(*rest, empty="nan").value.isnan().tolist() == [False, True]
    assert sequence_mean(*rest, token_epsilon=1e-8).value.tolist() == [0.0, 0.0]


def test_a_weight_of_0_keeps_nan_out() -> None:
    values, index = torch.tensor([math.nan, 2.0]), torch.tensor([0, 0])
    assert set_mean(values, index, 1, weights=torch.tensor([0.0, 1.0])).value.tolist() == [2.0]


def test_a_trained_nan_reaches_its_set_only() -> None:
    values, offsets = torch.tensor([math.nan, 2.0]), torch.tensor([0, 1, 2])
    found = token_mean(values, torch.ones(2), offsets, torch.tensor([0, 1]), 2)
    assert found.value.isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_sums_run_in_float64(dtype: torch.dtype) -> None:
    values, offsets, index = torch.ones(3000, dtype=dtype), torch.tensor([0, 3000]), STEP[:1]
    for kernel in (token_mean, sequence_mean):
        found = kernel(values, torch.ones(3000), offsets, index, 1)
        assert {one.dtype for one in found} == {dtype}
        assert found.value.item() == 1.0
    assert set_mean(values[:1], index, 1).value.dtype == dtype


def test_bad_arguments_are_refused() -> None:
    one, offsets, index = torch.ones(1), torch.tensor([0, 1]), torch.tensor([0])
    for kernel in (token_mean, sequence_mean):
        with pytest.raises(StageError, match="no empty 'one', expected one of zero, nan"):
            kernel(one, one, offsets, index, 1, empty="one")
        with pytest.raises(StageError, match="denominator has 2 along K, expected 1"):
            kernel(one, one, offsets, index, 1, denominator=torch.ones(2))
        with pytest.raises(StageError, match="mask has 2 along N, expected 1"):
            kernel(one, torch.ones(2), offsets, index, 1)
    with pytest.raises(StageError, match="index runs from 1 to 1, expected 0 to 0"):
        token_mean(one, one, offsets, index + 1, 1)
    with pytest.raises(StageError, match="no samples 'rows', expected one of all, trained"):
        sequence_mean(one, one, offsets, index, 1, samples="rows")
    with pytest.raises(StageError, match="token_denominator has 2 along S, expected 1"):
        sequence_mean(one, one, offsets, index, 1, token_denominator=torch.ones(2))
    with pytest.raises(StageError, match="weights has 2 along J, expected 1"):
        set_mean(one, index, 1, weights=torch.ones(2))

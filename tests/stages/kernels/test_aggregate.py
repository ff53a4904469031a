import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import references
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels import (
    MeanError,
    policy_loss,
    scatter_sum,
    scatter_sum_error,
    seq_mean_token_mean,
    seq_mean_token_mean_error,
)

VALUES = pools(float32s(-100.0, 100.0))


@given(packed(), VALUES)
def test_equals_a_loop_over_samples(rows: Packed, pool: list[float]) -> None:
    values = rows.tensor(pool)
    result = seq_mean_token_mean(values, rows.mask, rows.offsets)
    expected = references.seq_mean_token_mean(values.tolist(), rows.loss_mask, rows.lengths)
    assert result.mean.tolist() == pytest.approx(expected.mean, rel=1e-12, abs=1e-12)
    assert result.numerator.tolist() == pytest.approx(expected.numerator, rel=1e-12, abs=1e-12)
    assert result.denominator.tolist() == expected.denominator


@given(packed(), VALUES, st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 7.0]))
def test_masked_positions_have_no_effect(rows: Packed, pool: list[float], other: float) -> None:
    values = rows.tensor(pool)
    changed = torch.where(rows.mask, values, other)
    for kernel in (
        lambda x: seq_mean_token_mean(x, rows.mask, rows.offsets),
        lambda x: seq_mean_token_mean_error(x, x.abs(), rows.mask, rows.offsets),
    ):
        for before, after in zip(kernel(values), kernel(changed), strict=True):
            torch.testing.assert_close(before, after, rtol=0.0, atol=0.0)


@given(packed(), VALUES, st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(rows: Packed, pool: list[float], random: Random) -> None:
    parts = list(
        zip(
            torch.tensor_split(rows.tensor(pool), rows.offsets[1:-1]),
            torch.tensor_split(rows.mask, rows.offsets[1:-1]),
            rows.lengths,
            strict=False,
        )
    )
    order = random.sample(range(len(parts)), len(parts))
    if not parts:
        return
    shuffled = [parts[sample] for sample in order]
    moved = Packed([length for _, _, length in shuffled], [])
    values = torch.cat([part for part, _, _ in shuffled])
    mask = torch.cat([part for _, part, _ in shuffled])
    mean = seq_mean_token_mean(values, mask, moved.offsets).mean
    expected = seq_mean_token_mean(rows.tensor(pool), rows.mask, rows.offsets).mean
    torch.testing.assert_close(mean, expected[order], rtol=0.0, atol=0.0)


def test_golden_aggregation() -> None:
    """G14: the sum of the means, and the three ways that trainers divide it."""
    values = torch.tensor([1.0, 2, 3, 4, 10, 20, 0, 0, 5, 0, 0, 0])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    result = seq_mean_token_mean(values, mask, torch.tensor([0, 4, 8, 12]))
    assert result.mean.tolist() == [2.5, 15.0, 0.0]
    total = scatter_sum(result.mean, torch.zeros(3, dtype=torch.int64), 1).item()
    assert total == 17.5
    assert total / 3 == pytest.approx(5.83333349, rel=1e-7)
    assert total / 2 == 8.75
    token_mean = result.numerator.sum() / mask.sum()
    assert token_mean.item() == pytest.approx(6.66666651, rel=1e-7)
    assert result.denominator.tolist() == [4.0, 2.0, 1.0]


def test_a_given_denominator_takes_the_place_of_the_count() -> None:
    values, offsets = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 3])
    result = seq_mean_token_mean(
        values, torch.ones(3), offsets, denominator=torch.tensor([4.0, 2.0])
    )
    assert result.mean.tolist() == [0.75, 1.5]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("offsets", [[0, 2, 4], [0, 1, 4]])
def test_an_undefined_trained_token_reaches_its_sample_only(bad: float, offsets: list[int]) -> None:
    values = torch.tensor([bad, 1.0, bad, 2.0])
    mask = torch.tensor([True, True, False, True])
    mean = seq_mean_token_mean(values, mask, torch.tensor(offsets)).mean
    assert mean.isfinite().tolist() == [False, True]
    error = seq_mean_token_mean_error(values, None, mask, torch.tensor(offsets)).error
    assert error.isnan().tolist() == [True, False]


def test_empty_and_fully_masked_samples_are_0_over_1_and_exact() -> None:
    values, offsets = torch.tensor([3.0, math.nan]), torch.tensor([0, 0, 1, 2])
    result = seq_mean_token_mean(values, torch.tensor([0, 0]), offsets)
    assert result.mean.tolist() == [0.0, 0.0, 0.0]
    assert result.denominator.tolist() == [1.0, 1.0, 1.0]
    error = seq_mean_token_mean_error(values, None, torch.tensor([0, 0]), offsets)
    assert error.error.tolist() == [0.0, 0.0, 0.0]


@given(VALUES, VALUES, st.sampled_from([0.0, 0.01, -1.0]))
def test_the_policy_loss_equals_its_loop(
    pg: list[float], entropy: list[float], coef: float
) -> None:
    size = min(len(pg), len(entropy))
    pg, entropy = pg[:size], entropy[:size]
    loss = policy_loss(
        torch.tensor(pg, dtype=torch.float64),
        torch.tensor(entropy, dtype=torch.float64),
        entropy_coef=coef,
    )
    assert loss.tolist() == references.policy_loss(pg, entropy, entropy_coef=coef)


def test_an_undefined_entropy_passes_a_coefficient_of_0() -> None:
    assert policy_loss(torch.tensor(1.0), torch.tensor(math.nan), entropy_coef=0.0).isnan()


def test_the_dtype_is_kept_and_inputs_are_not_changed() -> None:
    values, mask, offsets = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), torch.tensor([0, 2])
    result = seq_mean_token_mean(values, mask, offsets)
    assert {one.dtype for one in result} == {torch.float32}
    for one in result:
        one.zero_()
    assert values.tolist() == [1.0, 2.0]
    assert mask.tolist() == [1.0, 0.0]


def test_inputs_of_different_length_are_refused() -> None:
    values, offsets = torch.ones(2), torch.tensor([0, 2])
    with pytest.raises(StageError, match="loss_mask has 1 along N, expected 2"):
        seq_mean_token_mean(values, torch.ones(1), offsets)
    with pytest.raises(StageError, match="errors has 3 along N, expected 2"):
        seq_mean_token_mean_error(values, torch.ones(3), torch.ones(2), offsets)
    with pytest.raises(StageError, match="index has 2 along S, expected 1"):
        scatter_sum_error(MeanError(torch.ones(1), torch.ones(1)), torch.zeros(2).long(), 1)

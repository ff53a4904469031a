import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import reference_losses
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels.m2po import m2po_keep, m2po_loss

RATIOS = pools(float32s(-30.0, 30.0) | float32s(-0.5, 0.5), size=15)
GAINS = pools(st.sampled_from([0.0, 1.0, -1.0]) | float32s(-2.0, 2.0), size=15)


def micro_batches(rows: Packed) -> tuple[Tensor, list[list[int]]]:
    """Deal the samples to three micro-batches: the index, and the trained tokens of each."""
    index = torch.arange(len(rows.lengths)) % 3
    tokens: list[list[int]] = [[], [], []]
    for sample, row in enumerate(reference_losses.rows(rows.lengths)):
        tokens[sample % 3] += [t for t in row if rows.loss_mask[t]]
    return index, tokens


@given(packed(max_samples=4, max_tokens=9), RATIOS, st.sampled_from([0.04, 0.371, 50.0]))
def test_what_is_kept_equals_a_loop_over_micro_batches(
    rows: Packed, pool: list[float], threshold: float
) -> None:
    log_weights = rows.tensor(pool)
    index, tokens = micro_batches(rows)
    found = m2po_keep(
        log_weights, rows.mask, rows.offsets, threshold=threshold, index=index, size=3
    )
    expected: set[int] = set()
    for trained in tokens:
        expected |= reference_losses.m2po_kept(log_weights.tolist(), trained, threshold=threshold)
    assert {t for t, kept in enumerate(found.tolist()) if kept} == expected


@given(packed(max_samples=4, max_tokens=9), RATIOS, GAINS, st.sampled_from([0.01, 0.2, 3.0]))
def test_the_bounds_equal_a_loop_over_micro_batches(
    rows: Packed, ratios: list[float], gains: list[float], budget: float
) -> None:
    log_ratio, advantages = rows.tensor(ratios), rows.tensor(gains)
    index, tokens = micro_batches(rows)
    found = m2po_loss(
        log_ratio, advantages, rows.mask, rows.offsets, budget=budget, index=index, size=3
    )
    columns = log_ratio.tolist(), advantages.tolist()
    bounds = [reference_losses.m2po_bounds(*columns, trained, budget=budget) for trained in tokens]
    low, high, moment, after = zip(*bounds, strict=True)
    assert found.eps_low.tolist() == pytest.approx(low, rel=1e-9)
    assert found.eps_high.tolist() == pytest.approx(high, rel=1e-9)
    assert found.moment.tolist() == pytest.approx(moment, rel=1e-12)
    assert found.moment_after.tolist() == pytest.approx(after, rel=1e-9)
    expected = []
    for sample, row in enumerate(reference_losses.rows(rows.lengths)):
        expected += [
            reference_losses.clip_loss(
                columns[0][t], columns[1][t], low=low[sample % 3], high=high[sample % 3]
            )
            for t in row
        ]
    assert found.pg_loss.tolist() == pytest.approx([one[0] for one in expected], rel=1e-9)


def test_golden_bounds() -> None:
    """G23, Relax: the bound lies under both floors."""
    found = m2po_loss(
        -torch.tensor([0.1, -0.5, -1.0, 0.8, -0.2, 0.3]),
        torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        torch.ones(6),
        torch.tensor([0, 6]),
        budget=0.2,
    )
    assert found.moment.item() == pytest.approx(0.495, rel=1e-7)
    assert found.moment_after.item() == pytest.approx(0.09, rel=1e-6)
    assert found.eps_low.item() == pytest.approx(0.3)
    assert found.eps_high.item() == pytest.approx(0.5)
    bare = m2po_loss(
        -torch.tensor([0.1, -0.5, -1.0, 0.8, -0.2, 0.3]),
        torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0]),
        torch.ones(6),
        torch.tensor([0, 6]),
        budget=0.2,
        least_low=0.0,
        least_high=0.0,
    )
    assert bare.eps_high.log1p().item() == pytest.approx(0.3, rel=1e-6)
    assert bare.eps_low.item() == pytest.approx(1 - math.exp(-0.3), rel=1e-6)


def test_golden_mask() -> None:
    """G23, AReaL: one token is masked."""
    log_weights = torch.tensor([0.1, 0.5, 0.2, 0.0, 0.3])
    found = m2po_keep(log_weights, torch.ones(5), torch.tensor([0, 5]), threshold=0.04)
    assert found.tolist() == [True, False, True, True, True]


def test_at_least_one_token_is_kept_and_nan_goes_first() -> None:
    log_weights, offsets = torch.tensor([5.0, 4.0, math.nan]), torch.tensor([0, 3])
    assert m2po_keep(log_weights, torch.ones(3), offsets).tolist() == [False, True, False]
    assert m2po_keep(log_weights, torch.zeros(3), offsets).tolist() == [False] * 3


def test_without_harmful_tokens_nothing_is_clipped() -> None:
    log_ratio, advantages = torch.tensor([-3.0, 5.0]), torch.tensor([1.0, -1.0])
    found = m2po_loss(log_ratio, advantages, torch.ones(2), torch.tensor([0, 2]))
    assert found.eps_low.tolist() == [1.0]
    assert found.eps_high.tolist() == [99999.0]
    assert found.clipped.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    values, offsets = torch.tensor([0.5, 1.5], dtype=dtype), torch.tensor([0, 2])
    found = m2po_loss(values, values, torch.ones(2), offsets)
    assert {found.pg_loss.dtype, found.clipped.dtype} == {dtype}
    assert found.eps_low.dtype == torch.float64
    found.pg_loss.zero_()
    assert values.tolist() == [0.5, 1.5]


def test_no_samples_have_no_bounds_to_solve() -> None:
    none, offsets = torch.zeros(0), torch.tensor([0])
    assert m2po_loss(none, none, none, offsets).pg_loss.numel() == 0
    assert m2po_keep(none, none, offsets).numel() == 0


def test_bad_arguments_are_refused() -> None:
    one, offsets = torch.ones(1), torch.tensor([0, 1])
    with pytest.raises(StageError, match=r"threshold is 0\.0, expected more than 0"):
        m2po_keep(one, one, offsets, threshold=0.0)
    with pytest.raises(StageError, match=r"budget is 0\.0, expected more than 0"):
        m2po_loss(one, one, one, offsets, budget=0.0)
    with pytest.raises(StageError, match="index runs from 3 to 3, expected 0 to 1"):
        m2po_loss(one, one, one, offsets, index=torch.tensor([3]), size=2)
    with pytest.raises(StageError, match="advantages has 2 along N, expected 1"):
        m2po_loss(one, torch.ones(2), one, offsets)

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import reference_advantages as references
from tests.helpers.packed import Packed, float32s, packed, pools
from tests.helpers.reference_advantages import flat, rows_of
from trajreplay.schema import StageError
from trajreplay.stages.kernels import optimal_token_advantages

ROWS = packed(max_samples=6, max_tokens=12)
REWARDS = pools(float32s(-10.0, 10.0), size=16)
LOG_PROBS = pools(float32s(-5.0, -0.125), size=16)
SHARES = pools(float32s(0.25, 1.0), size=16)


@given(ROWS, REWARDS, LOG_PROBS, SHARES, st.booleans(), st.booleans())
def test_equals_a_loop_over_tokens(
    rows: Packed,
    pool: list[float],
    logs: list[float],
    shares: list[float],
    zero_tail: bool,
    weighted: bool,
) -> None:
    rewards, log_probs, squares = rows.tensor(pool), rows.tensor(logs), 1 + rows.tensor(shares)
    weights = rows.tensor(shares[::-1]) if weighted else torch.ones_like(rewards)
    groups = [sample % 3 for sample in range(len(rows.lengths))]
    advantages = optimal_token_advantages(
        rewards,
        log_probs,
        squares,
        rows.mask,
        torch.tensor(groups, dtype=torch.int64),
        rows.offsets,
        weights=weights if weighted else None,
        zero_tail=zero_tail,
    )
    expected = references.optimal_token_advantages(
        rows_of(rewards.tolist(), rows.lengths),
        rows_of(log_probs.tolist(), rows.lengths),
        rows_of(squares.tolist(), rows.lengths),
        rows_of(weights.tolist(), rows.lengths),
        rows_of(rows.loss_mask, rows.lengths),
        groups,
        zero_tail=zero_tail,
    )
    assert advantages.tolist() == pytest.approx(flat(expected), rel=1e-9, abs=1e-9)


@given(ROWS, REWARDS, LOG_PROBS, st.sampled_from([math.nan, math.inf, 1e30]))
def test_masked_positions_have_no_effect(
    rows: Packed, pool: list[float], logs: list[float], other: float
) -> None:
    groups = torch.zeros(len(rows.lengths), dtype=torch.int64)

    def advantages(rewards: Tensor, log_probs: Tensor, squares: Tensor) -> Tensor:
        return optimal_token_advantages(
            rewards, log_probs, squares, rows.mask, groups, rows.offsets
        )

    inputs = rows.tensor(pool), rows.tensor(logs), rows.tensor([0.5])
    first, second, third = (torch.where(rows.mask, one, other) for one in inputs)
    changed = advantages(first, second, third)
    torch.testing.assert_close(advantages(*inputs), changed, rtol=0.0, atol=0.0)


def test_a_group_of_one_keeps_its_returns() -> None:
    rewards, ones = torch.tensor([0.0, 1.0]), torch.ones(2)
    alone = optimal_token_advantages(
        rewards, -ones, ones, ones, torch.tensor([4]), torch.tensor([0, 2])
    )
    assert alone.tolist() == [1.0, 1.0]


def test_the_longest_sample_has_no_baseline_beyond_the_second() -> None:
    rewards, ones = torch.tensor([1.0, 0.0, 0.0, 2.0]), torch.ones(4)
    args = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 4])
    tailed = optimal_token_advantages(rewards, -ones, ones, ones, *args)
    assert tailed[2:].tolist() == [2.0, 2.0]
    whole = optimal_token_advantages(rewards, -ones, ones, ones, *args, zero_tail=False)
    assert whole[2:].tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    ones = torch.ones(2, dtype=dtype)
    args = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2])
    assert optimal_token_advantages(ones, -ones, ones, ones, *args).dtype == dtype


def test_what_does_not_fit_is_refused() -> None:
    two, three, groups = torch.ones(2), torch.ones(3), torch.zeros(1)
    offsets = torch.tensor([0, 2])
    with pytest.raises(StageError, match="log_probs has 3 along N, expected 2 as in rewards"):
        optimal_token_advantages(two, three, two, two, groups, offsets)
    with pytest.raises(StageError, match="weights has 3 along N, expected 2"):
        optimal_token_advantages(two, two, two, two, groups, offsets, weights=three)
    with pytest.raises(StageError, match="group_index has 2 along S, expected 1 as in samples"):
        optimal_token_advantages(two, two, two, two, two, offsets)

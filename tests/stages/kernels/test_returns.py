import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_advantages as references
from tests.helpers.packed import Packed, float32s, packed, pools
from tests.helpers.reference_advantages import flat, rows_of
from trajreplay.schema import StageError
from trajreplay.stages.kernels import (
    discounted_returns,
    kl_penalised_advantages,
    kl_penalised_rewards,
    remax_advantages,
    token_rewards,
)
from trajreplay.stages.kernels.returns import RETURN_RULES, REWARDED_TOKENS

ROWS = packed(max_samples=6, max_tokens=12)
VALUES = pools(float32s(-10.0, 10.0), size=16)
FACTORS = pools(float32s(0.0, 1.0), size=16)
MASKED = st.sampled_from(["reset", "carry", "multiply"])
OTHERS = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 7.0])


def per_sample(rows: Packed, pool: list[float]) -> list[float]:
    return [pool[sample % len(pool)] for sample in range(len(rows.lengths))]


@given(
    ROWS,
    VALUES,
    VALUES,
    st.sampled_from(REWARDED_TOKENS),
    st.sampled_from([0.0, 0.1, -1.0]),
    st.booleans(),
)
def test_token_rewards_equal_a_loop(
    rows: Packed,
    pool: list[float],
    divergences: list[float],
    reward_at: str,
    kl_coef: float,
    kl_masked: bool,
) -> None:
    options: dict[str, Any] = {"reward_at": reward_at, "kl_coef": kl_coef, "kl_masked": kl_masked}
    rewards, kl = per_sample(rows, pool), rows.tensor(divergences)
    placed = token_rewards(
        torch.tensor(rewards, dtype=torch.float64), rows.mask, rows.offsets, kl=kl, **options
    )
    expected = references.token_rewards(
        rewards,
        rows_of(rows.loss_mask, rows.lengths),
        rows_of(kl.tolist(), rows.lengths),
        **options,
    )
    assert placed.tolist() == pytest.approx(flat(expected), rel=1e-12, abs=1e-12)


def test_the_token_after_the_last_unmasked_gets_the_reward_if_there_is_one() -> None:
    mask, offsets = torch.tensor([1, 0, 0, 1, 0, 1, 0]), torch.tensor([0, 3, 6, 7])
    placed = token_rewards(
        torch.tensor([1.0, 2.0, 4.0]), mask, offsets, reward_at="after-last-unmasked"
    )
    assert placed.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 2.0, 0.0]


@given(ROWS, VALUES, VALUES, st.sampled_from([0.0, 0.1, -1.0]), OTHERS)
def test_rewards_less_their_kl_equal_a_loop(
    rows: Packed, pool: list[float], divergences: list[float], kl_coef: float, other: float
) -> None:
    rewards, kl = per_sample(rows, pool), rows.tensor(divergences)
    expected = [
        reward - kl_coef * math.fsum(m * one for m, one in zip(mask, its, strict=True))
        for reward, mask, its in zip(
            rewards,
            rows_of(rows.loss_mask, rows.lengths),
            rows_of(kl.tolist(), rows.lengths),
            strict=True,
        )
    ]
    masked = torch.where(rows.mask != 0, kl, other)
    for given_kl in (kl, masked):
        paid = kl_penalised_rewards(
            torch.tensor(rewards, dtype=torch.float64),
            given_kl,
            rows.mask,
            rows.offsets,
            kl_coef=kl_coef,
        )
        assert paid.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(ROWS, VALUES, FACTORS, st.sampled_from(RETURN_RULES))
def test_returns_equal_a_loop(
    rows: Packed, pool: list[float], factors: list[float], masking: str
) -> None:
    rewards, gamma = rows.tensor(pool), per_sample(rows, factors)
    returns = discounted_returns(
        rewards,
        rows.mask,
        rows.offsets,
        gamma=torch.tensor(gamma, dtype=torch.float64),
        masking=masking,
    )
    expected = references.discounted_returns(
        rows_of(rewards.tolist(), rows.lengths),
        rows_of(rows.loss_mask, rows.lengths),
        gamma=gamma,
        masking=masking,
    )
    assert returns.tolist() == pytest.approx(flat(expected), rel=1e-12, abs=1e-12)


@given(ROWS, VALUES, MASKED, OTHERS)
def test_masked_positions_have_no_effect(
    rows: Packed, pool: list[float], masking: str, other: float
) -> None:
    rewards = rows.tensor(pool)
    changed = torch.where(rows.mask, rewards, other)
    for before, after in (
        (
            discounted_returns(rewards, rows.mask, rows.offsets, masking=masking),
            discounted_returns(changed, rows.mask, rows.offsets, masking=masking),
        ),
        (
            token_rewards(rows.offsets.diff(), rows.mask, rows.offsets, kl=rewards, kl_coef=0.1),
            token_rewards(rows.offsets.diff(), rows.mask, rows.offsets, kl=changed, kl_coef=0.1),
        ),
        (
            remax_advantages(rewards, rows.offsets.diff(), rows.mask, rows.offsets),
            remax_advantages(changed, rows.offsets.diff(), rows.mask, rows.offsets),
        ),
    ):
        torch.testing.assert_close(before, after, rtol=0.0, atol=0.0)


@given(ROWS, VALUES, st.sampled_from(RETURN_RULES), st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(
    rows: Packed, pool: list[float], masking: str, random: Random
) -> None:
    order = random.sample(range(len(rows.lengths)), len(rows.lengths))
    parts = rows_of(rows.tensor(pool).tolist(), rows.lengths)
    masks = rows_of(rows.loss_mask, rows.lengths)
    moved = Packed([rows.lengths[one] for one in order], [])
    returns = discounted_returns(
        torch.tensor(flat([parts[one] for one in order]), dtype=torch.float64),
        torch.tensor(flat([masks[one] for one in order])),
        moved.offsets,
        gamma=0.9,
        masking=masking,
    )
    whole = discounted_returns(
        rows.tensor(pool), rows.mask, rows.offsets, gamma=0.9, masking=masking
    )
    expected = rows_of(whole.tolist(), rows.lengths)
    shuffled = flat([expected[one] for one in order])
    assert returns.tolist() == pytest.approx(shuffled, rel=1e-12, abs=1e-12)


@given(ROWS, VALUES, VALUES)
def test_remax_and_penalised_advantages_equal_loops(
    rows: Packed, pool: list[float], baselines: list[float]
) -> None:
    values, own = rows.tensor(pool), per_sample(rows, baselines)
    by_sample = torch.tensor(own, dtype=torch.float64)
    parts, masks = rows_of(values.tolist(), rows.lengths), rows_of(rows.loss_mask, rows.lengths)
    returns = references.discounted_returns(
        parts, masks, gamma=[1.0] * len(own), masking="multiply"
    )
    expected = [
        g - m * b
        for row, mask, b in zip(returns, masks, own, strict=True)
        for g, m in zip(row, mask, strict=True)
    ]
    advantages = remax_advantages(values, by_sample, rows.mask, rows.offsets)
    assert advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    penalised = kl_penalised_advantages(by_sample, values, rows.offsets, kl_coef=0.1)
    expected = [b - 0.1 * one for row, b in zip(parts, own, strict=True) for one in row]
    assert penalised.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_golden_returns() -> None:
    """G17: verl at a gamma of 1, slime at 0.9."""
    rewards, mask, offsets = (
        torch.tensor([0.0, 0, 0, 0, 1]),
        torch.tensor([1, 1, 0, 1, 1]),
        torch.tensor([0, 5]),
    )
    verl = discounted_returns(rewards, mask, offsets, masking="reset")
    assert verl.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]
    slime = discounted_returns(rewards, mask, offsets, gamma=0.9)
    assert slime.tolist() == pytest.approx([0.6561, 0.729, 0.81, 0.9, 1.0])
    newer = discounted_returns(rewards, mask, offsets, masking="carry")
    assert newer.tolist() == [1.0, 1.0, 0.0, 1.0, 1.0]


def test_a_sample_with_nothing_to_reward_drops_its_reward() -> None:
    rewards, mask, offsets = (
        torch.tensor([1.0, 2.0, 3.0]),
        torch.zeros(2),
        torch.tensor([0, 2, 2, 2]),
    )
    assert token_rewards(rewards, mask, offsets).tolist() == [0.0, 0.0]
    assert token_rewards(rewards, mask, offsets, reward_at="last").tolist() == [0.0, 1.0]


def test_an_undefined_kl_passes_a_coefficient_of_0() -> None:
    kl = torch.full((2,), math.nan)
    placed = token_rewards(torch.ones(1), torch.ones(2), torch.tensor([0, 2]), kl=kl)
    assert placed.tolist() == [0.0, 1.0]


def test_an_undefined_token_stays_in_its_sample() -> None:
    rewards = torch.tensor([1.0, math.nan, 2.0])
    returns = discounted_returns(rewards, torch.ones(3), torch.tensor([0, 2, 3]))
    assert returns.isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_sums_run_in_float64(dtype: torch.dtype) -> None:
    count, offsets = 3000, torch.tensor([0, 3000])
    rewards, mask = torch.full((count,), 0.1, dtype=dtype), torch.ones(count)
    returns = discounted_returns(rewards, mask, offsets)
    assert returns.dtype == dtype
    exact = (rewards[0].double() * count).to(dtype)
    assert returns[0].item() == pytest.approx(exact.item(), rel=1e-12)
    for result in (
        token_rewards(rewards[:1], mask, offsets),
        remax_advantages(rewards, rewards[:1], mask, offsets),
        kl_penalised_advantages(rewards[:1], mask, offsets, kl_coef=0.1),
    ):
        assert result.dtype == dtype
        result.zero_()
    assert rewards.eq(torch.tensor(0.1, dtype=dtype)).all()


def test_what_does_not_fit_is_refused() -> None:
    one, two, offsets = torch.ones(1), torch.ones(2), torch.tensor([0, 2])
    with pytest.raises(StageError, match="rewards has 2 along S, expected 1 as in samples"):
        token_rewards(two, two, offsets)
    with pytest.raises(StageError, match="kl has 1 along N, expected 2"):
        token_rewards(one, two, offsets, kl=one, kl_coef=0.1)
    with pytest.raises(StageError, match=r"kl_coef is 0\.1 without a kl, expected one a token"):
        token_rewards(one, two, offsets, kl_coef=0.1)
    with pytest.raises(StageError, match="no reward_at 'first', expected one of last, last-unm"):
        token_rewards(one, two, offsets, reward_at="first")
    with pytest.raises(StageError, match="no masking rule 'skip', expected one of through, reset"):
        discounted_returns(two, two, offsets, masking="skip")
    with pytest.raises(StageError, match="loss_mask has 1 along N, expected 2"):
        discounted_returns(two, one, offsets)
    with pytest.raises(StageError, match="gamma has 2 along S, expected 1"):
        discounted_returns(two, two, offsets, gamma=two)
    with pytest.raises(StageError, match="greedy_rewards has 2 along S, expected 1"):
        remax_advantages(two, two, two, offsets)
    with pytest.raises(StageError, match="rewards has 2 along S, expected 1"):
        kl_penalised_advantages(two, two, offsets, kl_coef=0.1)

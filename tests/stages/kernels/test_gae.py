import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_advantages as references
from tests.helpers.packed import Packed, float32s, packed, pools
from tests.helpers.reference_advantages import flat, rows_of
from trajreplay.schema import StageError
from trajreplay.stages.kernels import gae_advantages, length_adaptive_lambda
from trajreplay.stages.kernels.gae import GAE_RULES

ROWS = packed(max_samples=6, max_tokens=12)
VALUES = pools(float32s(-10.0, 10.0), size=16)
FACTORS = pools(float32s(0.0, 1.0), size=16)
REWARDS, CRITIC = torch.tensor([0.0, 0, 0, 1]), torch.tensor([0.2, 0.4, 0.6, 0.8])
ONE_SAMPLE = torch.tensor([0, 4])


def per_sample(rows: Packed, pool: list[float]) -> list[float]:
    return [pool[sample % len(pool)] for sample in range(len(rows.lengths))]


@given(ROWS, VALUES, VALUES, FACTORS, st.sampled_from(GAE_RULES), st.booleans())
def test_equals_a_loop_over_tokens(
    rows: Packed,
    pool: list[float],
    critic: list[float],
    factors: list[float],
    masking: str,
    bootstrapped: bool,
) -> None:
    rewards, values = rows.tensor(pool), rows.tensor(critic)
    gamma, lam = per_sample(rows, factors), per_sample(rows, factors[::-1])
    last = per_sample(rows, critic if bootstrapped else [0.0])
    result = gae_advantages(
        rewards,
        values,
        rows.mask,
        rows.offsets,
        gamma=torch.tensor(gamma, dtype=torch.float64),
        lam=torch.tensor(lam, dtype=torch.float64),
        masking=masking,
        bootstrap=torch.tensor(last, dtype=torch.float64) if bootstrapped else None,
    )
    advantages, returns = references.gae(
        rows_of(rewards.tolist(), rows.lengths),
        rows_of(values.tolist(), rows.lengths),
        rows_of(rows.loss_mask, rows.lengths),
        gamma=gamma,
        lam=lam,
        masking=masking,
        bootstrap=last,
    )
    assert result.advantages.tolist() == pytest.approx(flat(advantages), rel=1e-9, abs=1e-9)
    assert result.returns.tolist() == pytest.approx(flat(returns), rel=1e-9, abs=1e-9)


@given(
    ROWS,
    VALUES,
    st.sampled_from(["carry", "multiply"]),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 7.0]),
)
def test_masked_positions_have_no_effect(
    rows: Packed, pool: list[float], masking: str, other: float
) -> None:
    before = rows.tensor(pool)
    after = torch.where(rows.mask, before, other)
    plain = gae_advantages(before, before, rows.mask, rows.offsets, lam=0.9, masking=masking)
    changed = gae_advantages(after, after, rows.mask, rows.offsets, lam=0.9, masking=masking)
    torch.testing.assert_close(plain.advantages, changed.advantages, rtol=0.0, atol=0.0)
    kept = rows.mask | (masking == "multiply")
    torch.testing.assert_close(plain.returns[kept], changed.returns[kept], rtol=0.0, atol=0.0)


@given(ROWS, VALUES, st.sampled_from(GAE_RULES), st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(
    rows: Packed, pool: list[float], masking: str, random: Random
) -> None:
    order = random.sample(range(len(rows.lengths)), len(rows.lengths))
    parts = rows_of(rows.tensor(pool).tolist(), rows.lengths)
    masks = rows_of(rows.loss_mask, rows.lengths)
    values = torch.tensor(flat([parts[one] for one in order]), dtype=torch.float64)
    mask = torch.tensor(flat([masks[one] for one in order]))
    offsets = Packed([rows.lengths[one] for one in order], []).offsets
    moved = gae_advantages(values, values, mask, offsets, lam=0.9, masking=masking).returns
    whole = gae_advantages(
        rows.tensor(pool), rows.tensor(pool), rows.mask, rows.offsets, lam=0.9, masking=masking
    )
    expected = rows_of(whole.returns.tolist(), rows.lengths)
    shuffled = flat([expected[one] for one in order])
    assert moved.tolist() == pytest.approx(shuffled, rel=1e-9, abs=1e-9)


def test_golden_unmasked() -> None:
    """G16."""
    ones = torch.ones(4)
    plain = gae_advantages(REWARDS, CRITIC, ones, ONE_SAMPLE, lam=0.95)
    assert plain.advantages.tolist() == pytest.approx([0.741975, 0.5705, 0.39, 0.2], abs=1e-7)
    assert plain.returns.tolist() == pytest.approx([0.941975, 0.9705, 0.99, 1.0], abs=1e-7)
    faded = gae_advantages(REWARDS, CRITIC, ones, ONE_SAMPLE, gamma=0.99, lam=0.9)
    expected = [0.662748694, 0.523848176, 0.370199949, 0.2]
    assert faded.advantages.tolist() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(
    ("masking", "expected"),
    [
        ("carry", [0.770500004, 0.39, 0.39, 0.2]),
        ("multiply", [0.721974969, 0.970499992, 0.39, 0.2]),
    ],
)
def test_golden_masked(masking: str, expected: list[float]) -> None:
    """G16: verl and OpenRLHF."""
    mask = torch.tensor([1, 0, 1, 1])
    result = gae_advantages(REWARDS, CRITIC, mask, ONE_SAMPLE, lam=0.95, masking=masking)
    assert result.advantages.tolist() == pytest.approx(expected, abs=1e-7)


def test_without_a_critic_advantages_are_returns() -> None:
    result = gae_advantages(
        REWARDS, torch.zeros(4), torch.ones(4), ONE_SAMPLE, bootstrap=torch.tensor([0.5])
    )
    assert result.advantages.tolist() == [1.5] * 4
    assert result.returns.tolist() == [1.5] * 4


def test_a_fully_masked_sample_and_an_empty_one_are_legal() -> None:
    values, offsets = torch.tensor([1.0, math.nan]), torch.tensor([0, 0, 2])
    result = gae_advantages(values, values, torch.zeros(2), offsets, masking="carry")
    assert result.advantages.tolist() == [0.0, 0.0]
    nothing = gae_advantages(values[:0], values[:0], values[:0], torch.tensor([0, 0]))
    assert nothing.returns.tolist() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    rewards, values = REWARDS.to(dtype), CRITIC.to(dtype)
    result = gae_advantages(rewards, values, torch.ones(4), ONE_SAMPLE)
    exact = gae_advantages(rewards.double(), values.double(), torch.ones(4), ONE_SAMPLE)
    for one, wide in zip(result, exact, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, wide.to(dtype))
        one.zero_()
    assert rewards.tolist() == REWARDS.tolist()


def test_longer_responses_have_a_lambda_nearer_to_1() -> None:
    lengths = torch.tensor([0, 5, 20, 40, 2000])
    lam = length_adaptive_lambda(lengths, alpha=0.05)
    assert lam.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.5, 0.99])
    assert length_adaptive_lambda(lengths.float(), alpha=0.05).dtype == torch.float32


def test_what_does_not_fit_is_refused() -> None:
    one, four = torch.ones(1), torch.ones(4)
    with pytest.raises(StageError, match="values has 1 along N, expected 4 as in rewards"):
        gae_advantages(four, one, four, ONE_SAMPLE)
    with pytest.raises(StageError, match="no masking rule 'reset', expected one of through, carry"):
        gae_advantages(four, four, four, ONE_SAMPLE, masking="reset")
    with pytest.raises(StageError, match="bootstrap has 4 along S, expected 1 as in samples"):
        gae_advantages(four, four, four, ONE_SAMPLE, bootstrap=four)
    with pytest.raises(StageError, match="lam has 4 along S, expected 1"):
        gae_advantages(four, four, four, ONE_SAMPLE, lam=four)
    with pytest.raises(StageError, match="offsets do not rise from 0 to 4"):
        gae_advantages(four, four, four, torch.tensor([0, 3]))
    with pytest.raises(StageError, match=r"alpha is 0\.0, expected more than 0"):
        length_adaptive_lambda(four, alpha=0.0)

import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers import reference_advantages as references
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels import whiten
from trajreplay.stages.kernels.whitening import CENTRES, WHITENING_FORMS

ROWS = packed(max_samples=6, max_tokens=12)
VALUES = pools(float32s(-10.0, 10.0), size=16)
OPTIONS = st.fixed_dictionaries(
    {
        "scale": st.booleans(),
        "form": st.sampled_from(WHITENING_FORMS),
        "ddof": st.integers(0, 1),
        "epsilon": st.sampled_from([1e-8, 1e-5]),
        "short": st.sampled_from(["keep", "nan"]),
    }
)
CENTRED = st.sampled_from(CENTRES)
GOLDEN = torch.tensor([0.5, -0.5, 1.0, 2.0, 7.0])
GOLDEN_MASK = torch.tensor([1, 1, 1, 1, 0])


@given(ROWS, VALUES, st.integers(1, 3), st.integers(1, 3), CENTRED, OPTIONS)
def test_around_any_mean_equals_a_loop_over_tokens(
    rows: Packed,
    pool: list[float],
    sets: int,
    centres: int,
    centre: str,
    options: dict[str, Any],
) -> None:
    values, index = rows.tensor(pool), torch.arange(rows.tokens) % sets
    others = torch.arange(rows.tokens) // 2 % centres
    options |= {"centre": centre}
    whitened = whiten(values, rows.mask, set_index=index, centre_index=others, **options)
    expected = references.whiten(
        values.tolist(), rows.loss_mask, index.tolist(), centre_index=others.tolist(), **options
    )
    assert whitened.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)


@given(ROWS, VALUES, OPTIONS)
def test_the_mean_of_the_same_tokens_is_that_of_the_set(
    rows: Packed, pool: list[float], options: dict[str, Any]
) -> None:
    values, every = rows.tensor(pool), torch.zeros(rows.tokens, dtype=torch.int64)
    assume(bool(rows.mask.any()))
    torch.testing.assert_close(
        whiten(values, rows.mask, centre_index=every, **options),
        whiten(values, rows.mask, **options),
        rtol=1e-6,
        atol=1e-6,
        equal_nan=True,
    )


@given(ROWS, VALUES, st.integers(1, 3), OPTIONS)
def test_equals_a_loop_over_tokens(
    rows: Packed, pool: list[float], sets: int, options: dict[str, Any]
) -> None:
    values, index = rows.tensor(pool), torch.arange(rows.tokens) % sets
    whitened = whiten(values, rows.mask, set_index=index, **options)
    expected = references.whiten(values.tolist(), rows.loss_mask, index.tolist(), **options)
    assert whitened.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6, nan_ok=True)


@given(ROWS, VALUES, OPTIONS, st.booleans(), st.sampled_from([math.nan, math.inf, 1e30]))
def test_masked_positions_have_no_effect_on_others(
    rows: Packed, pool: list[float], options: dict[str, Any], one_pass: bool, other: float
) -> None:
    values = rows.tensor(pool)
    changed = torch.where(rows.mask, values, other)
    torch.testing.assert_close(
        whiten(values, rows.mask, one_pass=one_pass, **options)[rows.mask],
        whiten(changed, rows.mask, one_pass=one_pass, **options)[rows.mask],
        rtol=0.0,
        atol=0.0,
        equal_nan=True,
    )


@given(ROWS, VALUES, OPTIONS, st.randoms(use_true_random=False))
def test_order_of_tokens_does_not_matter(
    rows: Packed, pool: list[float], options: dict[str, Any], random: Random
) -> None:
    values = rows.tensor(pool)
    order = random.sample(range(rows.tokens), rows.tokens)
    torch.testing.assert_close(
        whiten(values[order], rows.mask[order], **options),
        whiten(values, rows.mask, **options)[order],
        rtol=1e-6,
        atol=1e-6,
        equal_nan=True,
    )


@given(ROWS, VALUES)
def test_one_pass_is_two_passes_where_the_spread_is_not_small(
    rows: Packed, pool: list[float]
) -> None:
    values = rows.tensor(pool)
    counted = values[rows.mask]
    assume(counted.numel() > 1 and counted.std() > 1.0)
    torch.testing.assert_close(
        whiten(values, rows.mask, one_pass=True),
        whiten(values, rows.mask),
        rtol=1e-3,
        atol=1e-3,
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [-0.240192235, -1.20096111, 0.240192235, 1.20096111, 6.00480604]),
        (
            {"ddof": 0, "form": "floored"},
            [-0.277350098, -1.38675046, 0.277350098, 1.38675046],
        ),
        (
            {"form": "std", "epsilon": 1e-5},
            [-0.240189925, -1.20094955, 0.240189925, 1.20094955],
        ),
        ({"one_pass": True}, [-0.240192235, -1.20096111, 0.240192235, 1.20096111, 6.00480604]),
        ({"scale": False}, [-0.25, -1.25, 0.25, 1.25, 6.25]),
    ],
    ids=["verl", "openrlhf", "areal", "slime", "no_std_norm"],
)
def test_golden_whitening(options: dict[str, Any], expected: list[float]) -> None:
    """G15."""
    whitened = whiten(GOLDEN, GOLDEN_MASK, **options)
    assert whitened.tolist()[: len(expected)] == pytest.approx(expected, rel=3e-7)


def test_one_pass_knows_one_mean_only() -> None:
    with pytest.raises(StageError, match="one pass around 'leave-one-out'"):
        whiten(GOLDEN, GOLDEN_MASK, centre="leave-one-out", one_pass=True)


def test_golden_rewards_whitened_over_tokens() -> None:
    """G18: the rewards of two samples of two and three tokens, as NeMo-RL's REINFORCE++."""
    values, mask = torch.tensor([1.0, 1, 1, 0, 0, 0]), torch.tensor([1, 1, 0, 1, 1, 1])
    whitened = whiten(values, mask, ddof=0, form="floored")
    expected = [1.22474492] * 3 + [-0.816496551] * 3
    assert whitened.tolist() == pytest.approx(expected, rel=2e-7)


def test_one_pass_loses_a_small_spread_of_large_values() -> None:
    values = torch.tensor([1000.1, 1000.2, 1000.1, 1000.2])
    exact = whiten(values, torch.ones(4))
    assert exact.abs().tolist() == pytest.approx([0.75**0.5] * 4, rel=1e-3)
    lossy = whiten(values, torch.ones(4), one_pass=True)
    assert not torch.allclose(lossy, exact, rtol=0.1, equal_nan=True)


def test_golden_one_pass_of_equal_values() -> None:
    """G29: the variance of four values 1000.1 is 0 in one pass, and so is what is whitened."""
    values = torch.full((4,), 1000.1)
    for one_pass in (False, True):
        found = whiten(values, torch.ones(4), one_pass=one_pass)
        assert found.abs().max() < 1.0
        assert whiten(values, torch.ones(4), one_pass=one_pass, scale=False).abs().max() < 1e-3


def test_a_negative_one_pass_variance_is_undefined() -> None:
    """Values whose mean square float32 rounds down, and whose mean it then squares up."""
    bases = torch.arange(1.0, 200.0) / 7.0
    pairs = [torch.stack([one, torch.nextafter(one, one + 1.0)]) for one in bases]
    found = [whiten(one, torch.ones(2), one_pass=True) for one in pairs]
    assert any(one.isnan().all() for one in found)


@given(ROWS, VALUES, st.sampled_from([0.0, 1.0, 1000.1]), OPTIONS)
def test_one_pass_of_float64_is_exact(
    rows: Packed, pool: list[float], level: float, options: dict[str, Any]
) -> None:
    """G29: a tool takes the variance in float64, whatever its framework did."""
    values = (level + rows.tensor(pool) * 1e-4).double()
    found = whiten(values, rows.mask, one_pass=True, **options)
    torch.testing.assert_close(
        found, whiten(values, rows.mask, **options), rtol=0.0, atol=0.0, equal_nan=True
    )


def test_sets_do_not_see_each_other() -> None:
    values = torch.tensor([1.0, 3.0, 100.0, math.nan])
    whitened = whiten(values, torch.ones(4), set_index=torch.tensor([5, 5, 2, 2]), scale=False)
    assert whitened.tolist()[:2] == [-1.0, 1.0]
    assert whitened[2:].isnan().all()


def test_a_set_of_one_or_none_goes_by_its_rule() -> None:
    one, none = torch.tensor([1, 0]), torch.tensor([0, 0])
    values = torch.tensor([3.0, 5.0])
    assert whiten(values, one, short="biased").tolist()[0] == 0.0
    assert whiten(values, one, short="keep").tolist() == [0.0, 2.0]
    assert whiten(values, none, short="keep").tolist() == [3.0, 5.0]
    assert whiten(values, one, short="nan").isnan().all()
    assert whiten(values, one, scale=False).tolist() == [0.0, 2.0]
    with pytest.raises(StageError, match="1 of 1 sets have too few tokens that count, the least 1"):
        whiten(values, one)
    with pytest.raises(StageError, match="the least 0, expected 2 or more in each"):
        whiten(values, none, short="biased")
    with pytest.raises(StageError, match="the least 0, expected 1 or more in each"):
        whiten(values, none, ddof=0)
    assert whiten(values[:0], none[:0]).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    values = GOLDEN.to(dtype)
    whitened = whiten(values, GOLDEN_MASK)
    assert torch.equal(whitened, whiten(values.double(), GOLDEN_MASK).to(dtype))
    assert whitened.dtype == dtype
    whitened.zero_()
    assert values.tolist() == GOLDEN.tolist()


def test_what_does_not_fit_is_refused() -> None:
    two = torch.ones(2)
    with pytest.raises(StageError, match="loss_mask has 3 along N, expected 2"):
        whiten(two, torch.ones(3))
    with pytest.raises(StageError, match="set_index has 3 along N, expected 2"):
        whiten(two, two, set_index=torch.ones(3))
    with pytest.raises(StageError, match="no form 'divided', expected one of added, floored, std"):
        whiten(two, two, form="divided")
    with pytest.raises(StageError, match="no short rule 'drop'"):
        whiten(two, two, short="drop")
    with pytest.raises(StageError, match="ddof is 2, expected 0 or 1"):
        whiten(two, two, ddof=2)

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_means
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels.correction import (
    ACTIONS,
    LEVELS,
    NORMS,
    bound_weights,
    importance_weights,
    normalised_weights,
)

LOG_WEIGHTS = pools(float32s(-30.0, 30.0) | float32s(-0.5, 0.5), size=15)


@pytest.mark.parametrize("level", LEVELS)
@given(
    rows=packed(max_samples=4, max_tokens=9),
    pool=LOG_WEIGHTS,
    clamp=st.sampled_from([None, (-20.0, 20.0)]),
)
def test_the_weights_equal_a_loop(
    level: str, rows: Packed, pool: list[float], clamp: tuple[float, float] | None
) -> None:
    log_weights = rows.tensor(pool)
    found = importance_weights(log_weights, rows.mask, rows.offsets, level=level, clamp=clamp)
    expected = reference_means.importance_weights(
        log_weights.tolist(),
        rows.loss_mask,
        rows.lengths,
        level=level,
        clamp=clamp or (-math.inf, math.inf),
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
@given(
    rows=packed(max_samples=4, max_tokens=9),
    pool=pools(st.sampled_from([math.inf, -math.inf, math.nan, 88.0, 89.0, 1.0]), size=15),
    undefined=st.sampled_from([0.0, 1.0]),
)
def test_weights_that_float32_does_not_hold_become_what_is_asked(
    level: str, rows: Packed, pool: list[float], undefined: float
) -> None:
    log_weights = rows.tensor(pool)
    found = importance_weights(
        log_weights, rows.mask, rows.offsets, level=level, undefined=undefined
    )
    expected = reference_means.importance_weights(
        log_weights.tolist(), rows.loss_mask, rows.lengths, level=level, undefined=undefined
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-9)
    assert bool((found.float().isfinite()).all())


@pytest.mark.parametrize("action", ACTIONS)
@given(
    tokens=st.lists(st.tuples(float32s(0.0, 5.0), float32s(0.0, 5.0)), max_size=15),
    bounds=st.sampled_from([(0.5, 2.0), (None, 2.0), (0.5, None), (1.0, 1.0)]),
    judged=st.booleans(),
)
def test_the_bounds_equal_a_loop(
    action: str,
    tokens: list[tuple[float, float]],
    bounds: tuple[float | None, float | None],
    judged: bool,
) -> None:
    weights, criterion = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 2).T
    low, high = bounds
    found = bound_weights(
        weights, low=low, high=high, action=action, criterion=criterion if judged else None
    )
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    expected = [
        reference_means.bound_weight(
            weight, other if judged else weight, low=least, high=most, action=action
        )
        for weight, other in tokens
    ]
    assert found.weight.tolist() == expected
    by = [other if judged else weight for weight, other in tokens]
    assert found.below.tolist() == [value < least for value in by]
    assert found.above.tolist() == [value > most for value in by]


@pytest.mark.parametrize("level", NORMS)
@given(
    rows=packed(max_samples=4, max_tokens=9),
    pool=pools(st.just(0.0) | float32s(0.125, 5.0), size=15),
)
def test_the_normalised_weights_equal_a_loop(level: str, rows: Packed, pool: list[float]) -> None:
    weights, index = rows.tensor(pool), torch.arange(len(rows.lengths)) % 2
    found = normalised_weights(weights, rows.mask, rows.offsets, level=level, index=index, size=2)
    expected = reference_means.normalised(
        weights.tolist(), rows.loss_mask, rows.lengths, index.tolist(), level=level
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_golden_icepop() -> None:
    """G22, the interval of weights themselves; both ends are kept."""
    found = bound_weights(torch.tensor([3.0, 0.4, 0.25]), low=0.5, high=5.0, action="zero")
    assert found.weight.tolist() == [3.0, 0.0, 0.0]
    ends = bound_weights(torch.tensor([0.5, 5.0]), low=0.5, high=5.0, action="zero")
    assert ends.weight.tolist() == [0.5, 5.0]


def test_a_criterion_of_the_sample_leaves_the_weights_raw() -> None:
    log_weights, mask = torch.tensor([0.5, -0.5, 2.0]), torch.ones(3)
    offsets = torch.tensor([0, 2, 3])
    raw = importance_weights(log_weights, mask, offsets)
    judged = importance_weights(log_weights, mask, offsets, level="geometric")
    found = bound_weights(raw, low=0.9, high=1.2, action="zero", criterion=judged)
    assert found.weight.tolist() == [*raw[:2].tolist(), 0.0]
    assert found.above.tolist() == [False, False, True]


def test_an_undefined_weight_is_outside_but_passes_no_bound() -> None:
    nan = torch.tensor([math.nan])
    found = bound_weights(nan, low=0.5, high=2.0, action="zero")
    assert not (found.below | found.above).any()
    assert bound_weights(nan, high=2.0, action="zero").weight.tolist() == [0.0]
    assert bound_weights(nan, high=2.0).weight.isnan().all()
    overflown = torch.tensor([math.nan, 1000.0, -math.inf])
    found_weights = importance_weights(
        overflown, torch.ones(3), torch.tensor([0, 3]), undefined=0.0
    )
    assert found_weights.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    values = torch.tensor([0.5, 3.0], dtype=dtype)
    mask, offsets = torch.ones(2), torch.tensor([0, 2])
    for level in LEVELS:
        assert importance_weights(values, mask, offsets, level=level).dtype == dtype
    for action in ACTIONS:
        found = bound_weights(values, low=1.0, high=2.0, action=action).weight
        assert found.dtype == dtype
        found.zero_()
    normal = normalised_weights(values, mask, offsets)
    assert normal.dtype == dtype
    assert normal.tolist() == pytest.approx([2 / 7, 12 / 7], rel=1e-2)
    assert values.tolist() == [0.5, 3.0]


def test_bad_arguments_are_refused() -> None:
    one, offsets = torch.ones(1), torch.tensor([0, 1])
    with pytest.raises(StageError, match="no level 'seq', expected one of token, sequence"):
        importance_weights(one, one, offsets, level="seq")
    with pytest.raises(StageError, match="no action 'mask', expected one of truncate, zero"):
        bound_weights(one, high=2.0, action="mask")
    with pytest.raises(StageError, match="interval of weights has no end"):
        bound_weights(one)
    with pytest.raises(StageError, match=r"runs from 2\.0 to 1\.0, expected it to rise"):
        bound_weights(one, low=2.0, high=1.0)
    with pytest.raises(StageError, match="criterion has 2 along N, expected 1"):
        bound_weights(one, high=2.0, criterion=torch.ones(2))
    with pytest.raises(StageError, match="no level 'geometric', expected one of token, sequence"):
        normalised_weights(one, one, offsets, level="geometric")

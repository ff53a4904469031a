import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_means
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels.masked import STATISTICS
from trajreplay.stages.kernels.rejection import METRICS, divergence_keep, veto

LOG_WEIGHTS = pools(float32s(-30.0, 30.0) | float32s(-0.5, 0.5), size=15)


@pytest.mark.parametrize("metric", METRICS)
@given(
    statistic=st.sampled_from(STATISTICS),
    rows=packed(max_samples=4, max_tokens=9),
    pool=LOG_WEIGHTS,
    reverse=st.booleans(),
    clamp=st.sampled_from([None, (-20.0, 20.0)]),
)
def test_equals_a_loop_over_samples(
    metric: str,
    statistic: str,
    rows: Packed,
    pool: list[float],
    reverse: bool,
    clamp: tuple[float, float] | None,
) -> None:
    log_weights = rows.tensor(pool)
    found = divergence_keep(
        log_weights,
        rows.mask,
        rows.offsets,
        metric=metric,
        statistic=statistic,
        low=-0.0137,
        high=0.713,
        reverse=reverse,
        log_ratio_clamp=clamp,
    )
    expected = reference_means.criterion(
        log_weights.tolist(),
        rows.loss_mask,
        rows.lengths,
        metric=metric,
        statistic=statistic,
        reverse=reverse,
        clamp=clamp or (-math.inf, math.inf),
    )
    assert found.criterion.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-11)
    assert found.keep.tolist() == [-0.0137 <= value <= 0.713 for value in expected]


@given(packed(max_samples=4, max_tokens=9), LOG_WEIGHTS)
def test_the_veto_equals_a_loop_over_samples(rows: Packed, pool: list[float]) -> None:
    log_weights = rows.tensor(pool)
    found = veto(log_weights, rows.mask, rows.offsets, threshold=0.713)
    assert found.tolist() == reference_means.vetoed(
        log_weights.tolist(), rows.loss_mask, rows.lengths, threshold=0.713
    )


def test_golden_interval_of_k1_is_that_of_the_inverse_weight() -> None:
    """G22."""
    found = divergence_keep(
        torch.tensor([3.0, 0.4, 0.25]).log(),
        torch.ones(3),
        torch.tensor([0, 3]),
        metric="k1",
        reverse=True,
        low=math.log(0.5),
        high=math.log(5.0),
        log_ratio_clamp=(-20.0, 20.0),
    )
    assert found.keep.tolist() == [False, True, True]


def test_a_sample_without_trained_tokens_is_judged_by_0() -> None:
    nan, mask = torch.tensor([math.nan]), torch.zeros(1)
    offsets = torch.tensor([0, 1, 1])
    for statistic in ("sum", "mean", "max"):
        found = divergence_keep(nan, mask, offsets, metric="k3", statistic=statistic, high=0.5)
        assert found.keep.tolist() == [True]
        ratio = divergence_keep(nan, mask, offsets, statistic=statistic, high=0.5)
        assert ratio.criterion.tolist() == [1.0]
    assert veto(nan, mask, offsets, threshold=0.5).tolist() == [True]


def test_an_undefined_trained_token_is_left_out_and_not_vetoed() -> None:
    nan, offsets = torch.tensor([math.nan, 0.0]), torch.tensor([0, 1, 2])
    assert divergence_keep(nan, torch.ones(2), offsets, high=2.0).keep.tolist() == [False, True]
    assert veto(nan, torch.ones(2), offsets, threshold=0.5).tolist() == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    values, offsets = torch.tensor([0.5, 3.0], dtype=dtype), torch.tensor([0, 2])
    for metric in METRICS:
        found = divergence_keep(values, torch.ones(2), offsets, metric=metric, high=2.0)
        assert found.criterion.dtype == dtype
        found.criterion.zero_()
    assert values.tolist() == [0.5, 3.0]


def test_bad_arguments_are_refused() -> None:
    one, offsets = torch.ones(1), torch.tensor([0, 1])
    with pytest.raises(StageError, match="no metric 'abs', expected one of ratio, factor, k1"):
        divergence_keep(one, one, offsets, metric="abs", high=1.0)
    with pytest.raises(StageError, match="no statistic 'seq', expected one of token, sum"):
        divergence_keep(one, one, offsets, statistic="seq", high=1.0)
    with pytest.raises(StageError, match="the interval kept has no end"):
        divergence_keep(one, one, offsets)
    with pytest.raises(StageError, match=r"threshold is 0\.0, expected more than 0"):
        veto(one, one, offsets, threshold=0.0)
    with pytest.raises(StageError, match="mask has 2 along N, expected 1"):
        veto(one, torch.ones(2), offsets, threshold=0.5)

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import reference_losses
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels.masked import (
    STATISTICS,
    masked_max,
    masked_mean,
    masked_sum,
    sample_values,
    spread,
)

VALUES = pools(float32s(-100.0, 100.0), size=15)


@pytest.mark.parametrize("statistic", STATISTICS)
@given(
    rows=packed(max_samples=4, max_tokens=9), pool=VALUES, epsilon=st.sampled_from([0.0, 1e-8, 0.5])
)
def test_equals_a_loop_over_samples(
    statistic: str, rows: Packed, pool: list[float], epsilon: float
) -> None:
    values = rows.tensor(pool)
    found = sample_values(values, rows.mask, rows.offsets, statistic=statistic, epsilon=epsilon)
    expected = reference_losses.statistics(
        values.tolist(), rows.loss_mask, rows.lengths, statistic=statistic, epsilon=epsilon
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-11)


@pytest.mark.parametrize("kernel", [masked_sum, masked_mean, masked_max])
def test_masked_nan_stays_out_and_trained_nan_stays_in_its_sample(
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    values = torch.tensor([math.nan, 1.0, math.inf, 2.0, math.nan])
    mask, offsets = torch.tensor([1, 1, 0, 1, 0]), torch.tensor([0, 2, 4, 5])
    found = kernel(values, mask, offsets)
    assert found.dtype == torch.float64
    assert found.isnan().tolist() == [True, False, False]
    assert found[1:].tolist() == [2.0, 0.0]


def test_sums_of_narrow_tokens_run_in_float64() -> None:
    values = torch.ones(3000, dtype=torch.bfloat16)
    mask, offsets = torch.ones(3000), torch.tensor([0, 3000])
    assert masked_sum(values, mask, offsets).tolist() == [3000.0]


def test_the_dtype_is_kept_and_inputs_are_not_changed() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.tensor([1.0, 2.0], dtype=dtype)
        for statistic in STATISTICS:
            found = sample_values(values, torch.ones(2), torch.tensor([0, 2]), statistic=statistic)
            assert found.dtype == dtype
            found.zero_()
        assert values.tolist() == [1.0, 2.0]


def test_values_of_no_samples_spread_over_no_tokens() -> None:
    assert spread(torch.zeros(0), torch.tensor([0])).numel() == 0


def test_bad_arguments_are_refused() -> None:
    values, offsets = torch.ones(2), torch.tensor([0, 2])
    with pytest.raises(StageError, match="no statistic 'median', expected one of token, sum"):
        sample_values(values, torch.ones(2), offsets, statistic="median")
    with pytest.raises(StageError, match="mask has 1 along N, expected 2"):
        sample_values(values, torch.ones(1), offsets)
    with pytest.raises(StageError, match="offsets do not rise from 0 to 2"):
        sample_values(values, torch.ones(2), torch.tensor([0, 1]), statistic="token")

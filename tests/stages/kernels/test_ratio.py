import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_losses
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels.ratio import log_ratio, sequence_log_ratio

LOG_PROBS = pools(float32s(-30.0, 0.0), size=15)
CLAMPS = st.sampled_from([None, (-20.0, 20.0), (-math.inf, 10.0)])


@given(packed(max_samples=4, max_tokens=9), LOG_PROBS, LOG_PROBS, CLAMPS)
def test_the_log_ratio_equals_a_loop_over_tokens(
    rows: Packed, new: list[float], old: list[float], clamp: tuple[float, float] | None
) -> None:
    log_probs, old_log_probs = rows.tensor(new), rows.tensor(old)
    found = log_ratio(log_probs, old_log_probs, clamp=clamp)
    low, high = clamp or (-math.inf, math.inf)
    assert found.tolist() == [
        reference_losses.clamped(a - b, low, high)
        for a, b in zip(log_probs.tolist(), old_log_probs.tolist(), strict=True)
    ]


@pytest.mark.parametrize("form", ["mean", "sum"])
@given(
    rows=packed(max_samples=4, max_tokens=9),
    pool=pools(float32s(-30.0, 30.0), size=15),
    clamp=CLAMPS,
)
def test_the_log_ratio_of_samples_equals_a_loop(
    form: str, rows: Packed, pool: list[float], clamp: tuple[float, float] | None
) -> None:
    values = rows.tensor(pool)
    found = sequence_log_ratio(values, rows.mask, rows.offsets, form=form, clamp=clamp)
    expected = reference_losses.statistics(
        values.tolist(), rows.loss_mask, rows.lengths, statistic=form
    )
    low, high = clamp or (-math.inf, math.inf)
    limited = [reference_losses.clamped(value, low, high) for value in expected]
    assert found.tolist() == pytest.approx(limited, rel=1e-12, abs=1e-11)


def test_golden_ratio_of_a_sample() -> None:
    """G12."""
    tokens = log_ratio(torch.tensor([-0.9, -1.5, -0.3]), torch.tensor([-1.2, -1.0, -0.4]))
    found = sequence_log_ratio(tokens, torch.tensor([1, 1, 0]), torch.tensor([0, 3]))
    assert found.tolist() == pytest.approx([-0.0999999642] * 3, abs=5e-9)
    assert found.exp().tolist() == pytest.approx([0.90483743] * 3, rel=1e-7)


def test_without_old_log_probs_the_ratio_is_1() -> None:
    found = log_ratio(torch.tensor([-1.0, -30.0]), None)
    assert found.exp().tolist() == [1.0, 1.0]


def test_a_clamp_bounds_infinities_and_leaves_what_is_undefined() -> None:
    log_probs = torch.tensor([-math.inf, math.nan, -1.0])
    old_log_probs = torch.tensor([-math.inf, -1.0, -math.inf])
    left = log_ratio(log_probs, old_log_probs, clamp=(-20.0, 20.0))
    assert left.isnan().tolist() == [True, True, False]
    assert left[2] == 20.0


def test_a_sample_without_trained_tokens_has_ratio_1() -> None:
    values, offsets = torch.tensor([5.0, 5.0]), torch.tensor([0, 1, 2, 2])
    for epsilon in (0.0, 1e-8):
        found = sequence_log_ratio(values, torch.tensor([0, 1]), offsets, epsilon=epsilon)
        assert found.tolist() == pytest.approx([0.0, 5.0])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(StageError, match="old_log_probs has 2 along N, expected 1"):
        log_ratio(torch.ones(1), torch.ones(2))
    with pytest.raises(StageError, match="no form 'max', expected one of mean, sum"):
        sequence_log_ratio(torch.ones(1), torch.ones(1), torch.tensor([0, 1]), form="max")

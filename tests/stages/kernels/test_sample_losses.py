import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_losses
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels.sample_losses import gmpo_loss, vespo_loss

RATIOS = pools(float32s(-30.0, 30.0) | float32s(-0.5, 0.5), size=15)
GAINS = pools(st.sampled_from([0.0, 1.0, -1.0]) | float32s(-2.0, 2.0), size=15)


@given(packed(max_samples=4, max_tokens=9), RATIOS, GAINS, st.sampled_from([0.0, 1e-8]))
def test_gmpo_equals_a_loop_over_samples(
    rows: Packed, ratios: list[float], gains: list[float], epsilon: float
) -> None:
    log_ratio, advantages = rows.tensor(ratios), rows.tensor(gains)
    found = gmpo_loss(
        log_ratio,
        advantages,
        rows.mask,
        rows.offsets,
        eps_clip=0.2,
        eps_clip_high=0.28,
        epsilon=epsilon,
    )
    expected = reference_losses.gmpo_loss(
        log_ratio.tolist(),
        advantages.tolist(),
        rows.loss_mask,
        rows.lengths,
        low=0.2,
        high=0.28,
        epsilon=epsilon,
    )
    assert found.pg_loss.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    outside = [not -0.2 <= ratio <= 0.28 for ratio in log_ratio.tolist()]
    gains = advantages.tolist()
    assert found.clipped.tolist() == [
        out and gain > 0 for out, gain in zip(outside, gains, strict=True)
    ]
    assert found.clipped_low.tolist() == [
        out and gain < 0 for out, gain in zip(outside, gains, strict=True)
    ]


@pytest.mark.parametrize("corrected", [False, True])
@given(
    rows=packed(max_samples=4, max_tokens=9),
    new=pools(float32s(-9.0, 0.0), size=15),
    ratios=pools(float32s(-30.0, 30.0) | float32s(-0.1, 0.1), size=15),
    gains=GAINS,
    weights=pools(st.sampled_from([0.0, 1.0]) | float32s(0.5, 2.0), size=15),
)
def test_vespo_equals_a_loop_over_samples(
    corrected: bool,
    rows: Packed,
    new: list[float],
    ratios: list[float],
    gains: list[float],
    weights: list[float],
) -> None:
    log_probs, log_ratio, advantages = (rows.tensor(pool) for pool in (new, ratios, gains))
    rollout_weights = rows.tensor(weights) if corrected else None
    found = vespo_loss(
        log_probs,
        log_ratio,
        advantages,
        rows.mask,
        rows.offsets,
        rollout_weights=rollout_weights,
    )
    expected = reference_losses.vespo_loss(
        log_probs.tolist(),
        log_ratio.tolist(),
        advantages.tolist(),
        rows.loss_mask,
        rows.lengths,
        rollout_weights=None if rollout_weights is None else rollout_weights.tolist(),
    )
    assert found.pg_loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@given(
    rows=packed(max_samples=4, max_tokens=9),
    ratios=pools(float32s(-0.1, 0.1), size=15),
    gains=pools(float32s(-2.0, 2.0), size=15),
)
def test_narrow_inputs_give_narrow_results_near_the_exact(
    dtype: torch.dtype, near: float, rows: Packed, ratios: list[float], gains: list[float]
) -> None:
    log_ratio, advantages = rows.tensor(ratios).to(dtype), rows.tensor(gains).to(dtype)
    rest = rows.mask, rows.offsets
    found = gmpo_loss(log_ratio, advantages, *rest)
    exact = gmpo_loss(log_ratio.double(), advantages.double(), *rest).pg_loss
    assert {one.dtype for one in found} == {dtype}
    assert ((found.pg_loss.double() - exact).abs() <= near * exact.abs().clamp(min=0.1)).all()
    assert {one.dtype for one in vespo_loss(log_ratio, log_ratio, advantages, *rest)} == {dtype}


def test_golden_gmpo() -> None:
    """G13."""
    log_ratio = torch.tensor([-0.9, -1.5, -0.3]) - torch.tensor([-1.2, -1.0, -0.4])
    found = gmpo_loss(
        log_ratio, torch.ones(3), torch.ones(3), torch.tensor([0, 3]), eps_clip_high=0.28
    )
    assert found.ratio.tolist() == pytest.approx([0.960789442], rel=1e-7)
    assert found.pg_loss.tolist() == pytest.approx([-0.960789442], rel=1e-7)


def test_a_sample_without_trained_tokens_has_loss_0() -> None:
    nan = torch.tensor([math.nan])
    found = gmpo_loss(nan, nan, torch.zeros(1), torch.tensor([0, 1, 1]))
    assert found.pg_loss.tolist() == [0.0, 0.0]
    assert found.ratio.tolist() == [1.0, 1.0]
    assert found.clipped.tolist() == [0.0]


def test_a_far_sample_gets_no_weight() -> None:
    one, offsets = torch.ones(1), torch.tensor([0, 1])
    found = vespo_loss(-one, 20.0 * one, one, one, offsets)
    assert found.phi.tolist() == [0.0]


def test_inputs_are_not_changed() -> None:
    inputs = torch.tensor([[-1.0], [0.5], [1.0]])
    log_probs, log_ratio, advantages = inputs
    rest = torch.ones(1), torch.tensor([0, 1])
    gmpo_loss(log_ratio, advantages, *rest).pg_loss.zero_()
    weights = torch.tensor([0.5])
    vespo_loss(log_probs, log_ratio, advantages, *rest, rollout_weights=weights).phi.zero_()
    assert inputs.tolist() == [[-1.0], [0.5], [1.0]]
    assert weights.tolist() == [0.5]


def test_bad_arguments_are_refused() -> None:
    one, offsets = torch.ones(1), torch.tensor([0, 1])
    with pytest.raises(StageError, match="gmpo_loss: advantages has 2 along N, expected 1"):
        gmpo_loss(one, torch.ones(2), one, offsets)
    with pytest.raises(StageError, match="vespo_loss: log_ratio has 2 along N, expected 1"):
        vespo_loss(one, torch.ones(2), one, one, offsets)
    with pytest.raises(StageError, match="mask has 2 along N, expected 1"):
        vespo_loss(one, one, one, torch.ones(2), offsets)

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_losses
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels.clipping import clip_loss
from trajreplay.stages.kernels.correction import importance_weights
from trajreplay.stages.kernels.off_policy import off_policy_keep, proximal_log_probs
from trajreplay.stages.kernels.ratio import log_ratio

LOG_PROBS = float32s(-9.0, 0.0)


@given(
    packed(max_samples=4, max_tokens=9),
    pools(float32s(-30.0, 30.0) | float32s(-0.5, 0.5), size=15),
    pools(float32s(-1.0, 1.0), size=15),
)
def test_what_is_kept_equals_a_loop_over_samples(
    rows: Packed, ratios: list[float], gains: list[float]
) -> None:
    log_ratio_, advantages = rows.tensor(ratios), rows.tensor(gains)
    found = off_policy_keep(log_ratio_, advantages, rows.mask, rows.offsets, threshold=0.0137)
    expected = reference_losses.statistics(
        [-ratio for ratio in log_ratio_.tolist()], rows.loss_mask, rows.lengths, statistic="mean"
    )
    assert found.divergence.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert found.keep.tolist() == [
        gain >= 0 or kl <= 0.0137 for gain, kl in zip(advantages.tolist(), expected, strict=True)
    ]


@given(st.lists(st.tuples(LOG_PROBS, LOG_PROBS, st.integers(-1, 9), st.integers(0, 9))))
def test_the_proximal_policy_equals_a_loop(tokens: list[tuple[float, float, int, int]]) -> None:
    expected = []
    for log_prob, rollout, sampled, now in tokens:
        share = (now - 1 - sampled) / (now - sampled) if now > sampled >= 0 else 0.0
        expected.append(rollout + min(max(share, 0.0), 1.0) * (log_prob - rollout))
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 4).T
    found = proximal_log_probs(*columns[:2], *columns[2:].long())
    assert found.tolist() == pytest.approx(expected, rel=1e-13)


def test_golden_divergence() -> None:
    """G28."""
    tokens = log_ratio(torch.tensor([-1.0, -1.2]), torch.tensor([-0.9, -1.0]))
    rest = torch.ones(2), torch.tensor([0, 2])
    found = off_policy_keep(tokens, -torch.ones(2), *rest)
    assert found.divergence.tolist() == pytest.approx([0.15, 0.15], rel=1e-6)
    assert found.keep.tolist() == [False, False]
    assert off_policy_keep(tokens, torch.zeros(2), *rest).keep.tolist() == [True, True]


def test_golden_interpolation() -> None:
    """G21: the weights of step 3 sampled, those of step 6 train."""
    found = proximal_log_probs(
        torch.tensor([-0.9]), torch.tensor([-1.3]), torch.tensor([3]), torch.tensor([6])
    )
    assert found.tolist() == pytest.approx([-1.0333333], rel=1e-7)


def test_golden_decoupled_loss() -> None:
    """G21: the ratio to the proximal policy, weighted by the proximal to the rollout."""
    log_probs, proximal = torch.tensor([-0.9, -1.4]), torch.tensor([-1.0, -1.2])
    rollout, mask, offsets = torch.tensor([-1.3, -1.1]), torch.ones(2), torch.tensor([0, 2])
    tokens = log_ratio(log_probs, proximal)
    assert tokens.exp().tolist() == pytest.approx([1.10517097, 0.818730831], rel=2e-7)
    weights = importance_weights(log_ratio(proximal, rollout), mask, offsets)
    assert weights.tolist() == pytest.approx([1.34985876, 0.904837370], rel=2e-7)
    loss = clip_loss(tokens, torch.tensor([1.0, -1.0])).pg_loss * weights
    assert loss.mean().item() == pytest.approx(-0.375503242, rel=3e-7)


def test_tokens_as_new_as_the_weights_keep_the_rollout() -> None:
    versions = torch.tensor([5, 6, -1, 4])
    found = proximal_log_probs(-torch.ones(4), -3.0 * torch.ones(4), versions, 5)
    assert found.tolist() == [-3.0, -3.0, -3.0, -3.0]


def test_an_undefined_divergence_drops_negative_advantages_only() -> None:
    nan, offsets = torch.tensor([math.nan, math.nan]), torch.tensor([0, 1, 2])
    found = off_policy_keep(nan, torch.tensor([1.0, -1.0]), torch.ones(2), offsets)
    assert found.keep.tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    values, offsets = torch.tensor([-0.5, -1.5], dtype=dtype), torch.tensor([0, 2])
    found = off_policy_keep(values, values, torch.ones(2), offsets).divergence
    assert found.dtype == dtype
    assert found.tolist() == [1.0, 1.0]
    proximal = proximal_log_probs(values, values, torch.tensor([0, 0]), 4)
    assert proximal.dtype == dtype
    proximal.zero_()
    assert values.tolist() == [-0.5, -1.5]


def test_bad_arguments_are_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(StageError, match="advantages has 2 along N, expected 1"):
        off_policy_keep(one, torch.ones(2), one, torch.tensor([0, 1]))
    with pytest.raises(StageError, match="rollout_version has 2 along N, expected 1"):
        proximal_log_probs(one, one, torch.ones(2), 1)

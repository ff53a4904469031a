"""verl's aggregations, its value loss and its KL penalties."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.replayed_means import replayed_mean
from tests.oracles.aggregation import MODES, aggregate
from tests.oracles.frameworks import Verl, compared_strings
from tests.oracles.padded import Batch, assert_rounded, batches
from trajreplay.stages.kernels import value_loss, weighted_kl

pytestmark = pytest.mark.oracle

K3: dict[str, Any] = {
    "estimator": "k3",
    "value_clamp": (-10.0, 10.0),
    "log_ratio_clamp": (-20.0, 20.0),
}
PENALTIES: dict[str, dict[str, Any]] = {
    "abs": {"estimator": "abs"},
    "k1": {"estimator": "k1"},
    "k2": {"estimator": "k2"},
    "k3": K3,
    "kl": {"estimator": "k1"},
    "low_var_kl": K3,
    "mse": {"estimator": "k2"},
}
PENALTIES_LEFT_OUT = {"full": "needs the logits of the whole vocabulary; verl raises"}


def test_every_aggregation_is_compared(verl: Verl) -> None:
    assert compared_strings(verl.core.agg_loss, "loss_agg_mode") == set(MODES)


def test_every_penalty_is_compared_or_left_out_for_a_reason(verl: Verl) -> None:
    known = compared_strings(verl.core.kl_penalty_forward, "kl_penalty")
    assert known == set(PENALTIES) | set(PENALTIES_LEFT_OUT)


@pytest.mark.parametrize("mode", MODES)
@given(batch=batches())
def test_aggregations_are_those_of_verl(verl: Verl, mode: str, batch: Batch) -> None:
    expected = aggregate(batch.packed(batch.advantages), batch, mode)
    assert_rounded(verl.core.agg_loss(batch.advantages, batch.mask, mode), expected, size=100.0)


@pytest.mark.parametrize("mode", MODES)
@given(batch=batches(), ranks=st.integers(1, 4), scale=st.none() | st.integers(1, 64))
def test_aggregations_of_one_rank_among_others_are_those_of_verl(
    verl: Verl, mode: str, batch: Batch, ranks: int, scale: int | None
) -> None:
    tokens, samples = 40 * ranks, 6 * ranks
    found = verl.core.agg_loss(batch.advantages, batch.mask, mode, ranks, tokens, samples, scale)
    expected = aggregate(
        batch.packed(batch.advantages),
        batch,
        mode,
        ranks=ranks,
        global_tokens=tokens,
        global_samples=samples,
        scale=scale,
    )
    assert_rounded(found, expected, size=100.0)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_tokens_that_count_is_that_of_verl(verl: Verl, mode: str) -> None:
    one = torch.zeros(1, 2)
    batch = Batch(torch.tensor([2]), one, torch.tensor([0]), *[one] * 10)
    found = verl.core.agg_loss(one, one, mode)
    assert_rounded(found, aggregate(batch.packed(one), batch, mode))


@given(batch=batches(), mode=st.sampled_from(MODES), clip=st.sampled_from([0.25, 0.5]))
def test_value_losses_are_those_of_verl(verl: Verl, batch: Batch, mode: str, clip: float) -> None:
    found, fraction = verl.core.compute_value_loss(
        batch.values, batch.advantages, batch.token_rewards, batch.mask, clip, mode
    )
    tokens = value_loss(
        batch.packed(batch.values),
        batch.packed(batch.advantages),
        batch.packed(batch.token_rewards),
        value_clip=clip,
    )
    assert_rounded(found, aggregate(tokens.value_loss, batch, mode), size=100.0)
    clipped = replayed_mean(tokens.clipped, batch.flat_mask, batch.offsets, count_epsilon=1e-8)
    assert_rounded(fraction, clipped)


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("name", sorted(PENALTIES))
@given(batch=batches())
def test_penalties_are_those_of_verl(
    verl: Verl, name: str, straight_through: bool, batch: Batch
) -> None:
    suffix = "+" if straight_through else ""
    found = verl.core.kl_penalty(batch.log_probs, batch.ref_log_probs, name + suffix)
    expected = weighted_kl(
        batch.packed(batch.log_probs), batch.packed(batch.ref_log_probs), **PENALTIES[name]
    )
    assert_rounded(batch.packed(found), expected)

"""What holds of every kernel of the losses: masks, the order of samples, devices, dtypes."""

import math
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.devices import DEVICES
from trajreplay.stages.kernels.clipping import cispo_loss, clip_loss, policy_gradient_loss
from trajreplay.stages.kernels.correction import (
    bound_weights,
    importance_weights,
    normalised_weights,
)
from trajreplay.stages.kernels.dppo import dppo_loss
from trajreplay.stages.kernels.gates import kl_cov_loss, sapo_loss
from trajreplay.stages.kernels.kl_loss import weighted_kl
from trajreplay.stages.kernels.m2po import m2po_keep, m2po_loss
from trajreplay.stages.kernels.masked import sample_values
from trajreplay.stages.kernels.off_policy import off_policy_keep, proximal_log_probs
from trajreplay.stages.kernels.ratio import log_ratio, sequence_log_ratio
from trajreplay.stages.kernels.rejection import divergence_keep, veto
from trajreplay.stages.kernels.sample_losses import gmpo_loss, vespo_loss
from trajreplay.stages.kernels.value import value_loss

SETS = 3


@dataclass(frozen=True)
class Batch:
    """The tokens of some samples, four columns of them, in micro-batches."""

    columns: Tensor
    mask: Tensor
    lengths: list[int]
    index: Tensor

    @property
    def offsets(self) -> Tensor:
        """Where each sample begins, and the number of tokens."""
        return torch.tensor([0, *self.lengths], device=self.mask.device).cumsum(0)

    def ordered(self, order: list[int]) -> "Batch":
        """The same samples in another order."""
        return Batch(
            torch.cat([self.columns[:, token] for token in self.tokens(order)], 1),
            torch.cat([self.mask[token] for token in self.tokens(order)]),
            [self.lengths[sample] for sample in order],
            self.index[order],
        )

    def tokens(self, order: list[int]) -> list[slice]:
        """Where the tokens of the samples lie, in an order of the samples."""
        ends = self.offsets.tolist()
        return [slice(ends[sample], ends[sample + 1]) for sample in order]


def over_tokens(batch: Batch) -> tuple[Tensor, ...]:
    """Give (N,) tensors: every kernel that has a value a token."""
    new, old, rollout, advantages = batch.columns
    rest = batch.mask, batch.offsets
    ratio, d = log_ratio(new, old), log_ratio(old, rollout)
    weights = importance_weights(d, *rest, level="sequence", clamp=(-20.0, 20.0))
    versions = torch.full_like(batch.mask, 2, dtype=torch.int64)
    return (
        *(sample_values(new, *rest, statistic=one) for one in ("token", "sum", "mean", "max")),
        sequence_log_ratio(ratio, *rest, epsilon=1e-8),
        *clip_loss(ratio, advantages, dual_clip=3.0),
        *cispo_loss(new, ratio, advantages),
        policy_gradient_loss(new, advantages),
        *gmpo_loss(ratio, advantages, *rest)[2:],
        *vespo_loss(new, ratio, advantages, *rest, rollout_weights=weights),
        *sapo_loss(ratio, advantages),
        *dppo_loss(new, rollout, advantages),
        *kl_cov_loss(new, ratio, advantages, *rest, fraction=0.2, index=batch.index, size=SETS),
        *bound_weights(weights, low=0.5, high=2.0, action="zero"),
        normalised_weights(weights, *rest, index=batch.index, size=SETS),
        normalised_weights(weights, *rest, level="sequence", index=batch.index, size=SETS),
        *divergence_keep(d, *rest, metric="k3", statistic="max", high=0.1),
        veto(d, *rest, threshold=0.6),
        m2po_keep(d, *rest, threshold=0.04, index=batch.index, size=SETS),
        *m2po_loss(ratio, advantages, *rest, budget=0.05, index=batch.index, size=SETS)[:2],
        *off_policy_keep(ratio, advantages, *rest),
        proximal_log_probs(new, rollout, versions, 5),
        *value_loss(new, old, rollout, value_clip=0.2, huber_delta=0.5),
        weighted_kl(new, old, estimator="abs", weights=ratio.exp()),
    )


def over_samples(batch: Batch) -> tuple[Tensor, ...]:
    """Give (S,) tensors: every kernel that has a value a sample."""
    new, old, _, advantages = batch.columns
    rest = batch.mask, batch.offsets
    return (*gmpo_loss(log_ratio(new, old), advantages, *rest)[:2],)


def over_sets(batch: Batch) -> tuple[Tensor, ...]:
    """Give tensors of the micro-batches: every kernel that has a value each."""
    new, old, _, advantages = batch.columns
    rest = batch.mask, batch.offsets
    return (
        *m2po_loss(
            log_ratio(new, old), advantages, *rest, budget=0.05, index=batch.index, size=SETS
        )[2:],
    )


def drawn(seed: int, lengths: list[int], *, share: float = 0.7) -> Batch:
    """Draw tokens, so many of them trained."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    columns = torch.rand(4, tokens, generator=generator, dtype=torch.float64) - 1.0
    columns[3] = columns[3] * 4.0 + 2.0
    mask = torch.rand(tokens, generator=generator) < share
    return Batch(columns, mask, lengths, torch.arange(len(lengths)) % SETS)


BATCHES = st.builds(
    drawn,
    st.integers(0, 2**32),
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    share=st.sampled_from([0.0, 0.7, 1.0]),
)


@given(BATCHES, st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -7.0]))
def test_masked_positions_have_no_effect(batch: Batch, other: float) -> None:
    changed = replace(batch, columns=torch.where(batch.mask, batch.columns, other))
    for before, after in zip(over_tokens(batch), over_tokens(changed), strict=True):
        torch.testing.assert_close(before[batch.mask], after[batch.mask], rtol=0.0, atol=0.0)
    for kernels in (over_samples, over_sets):
        for before, after in zip(kernels(batch), kernels(changed), strict=True):
            torch.testing.assert_close(before, after, rtol=0.0, atol=0.0)


@given(BATCHES, st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(batch: Batch, random: Random) -> None:
    order = random.sample(range(len(batch.lengths)), len(batch.lengths))
    moved = batch.ordered(order)
    for before, after in zip(over_tokens(batch), over_tokens(moved), strict=True):
        expected = torch.cat([before[token] for token in batch.tokens(order)])
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)
    for before, after in zip(over_samples(batch), over_samples(moved), strict=True):
        torch.testing.assert_close(after, before[order], rtol=1e-12, atol=1e-12)
    for before, after in zip(over_sets(batch), over_sets(moved), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [3, 0, 9, 8]])
def test_every_kernel_runs_on_the_device_of_its_inputs(device: str, lengths: list[int]) -> None:
    batch = drawn(0, lengths)
    there = Batch(batch.columns.to(device), batch.mask.to(device), lengths, batch.index.to(device))
    for kernels in (over_tokens, over_samples, over_sets):
        for value, on_cpu in zip(kernels(there), kernels(batch), strict=True):
            assert value.device.type == device
            torch.testing.assert_close(value.cpu(), on_cpu, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_keep_the_dtype_of_their_inputs(dtype: torch.dtype) -> None:
    batch = drawn(0, [3, 0, 9, 8])
    narrow = replace(batch, columns=batch.columns.to(dtype))
    assert {one.dtype for one in over_tokens(narrow)} == {dtype, torch.bool}
    assert {one.dtype for one in over_samples(narrow)} == {dtype}
    assert {one.dtype for one in over_sets(narrow)} == {torch.float64}

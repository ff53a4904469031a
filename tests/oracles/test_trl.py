"""The losses of TRL's GRPO, GMPO and RLOO trainers, for every loss type."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.replayed_means import replayed_mean
from tests.oracles.frameworks import Trl, compared_strings
from tests.oracles.padded import Batch, assert_rounded, batches
from tests.oracles.stand_in import loss_of
from trajreplay.stages.kernels import (
    cispo_loss,
    clip_loss,
    gmpo_loss,
    log_ratio,
    off_policy_keep,
    sapo_loss,
    sequence_log_ratio,
    vespo_loss,
    weighted_kl,
)

pytestmark = pytest.mark.oracle

LOW, HIGH, BETA = 0.1875, 0.28125, 0.125
MAX_LENGTH = 12
STEPS_PER_GENERATION, ACCUMULATION, GENERATED_TOKENS = 4, 2, 50
THRESHOLD = 0.25
LEVELS = ("sequence", "token")
# The mean divergence of a sample nearer to the threshold may pass it by a rounding of float32.
LEAST_MARGIN = 1e-3


def ratio(batch: Batch) -> Tensor:
    return log_ratio(batch.packed(batch.log_probs), batch.packed(batch.old_log_probs))


def advantages(batch: Batch) -> Tensor:
    return batch.spread(batch.greedy_rewards)


def at_level(batch: Batch, level: str) -> Tensor:
    if level == "token":
        return ratio(batch)
    return sequence_log_ratio(ratio(batch), batch.flat_mask, batch.offsets)


def clipped(batch: Batch, level: str, delta: float | None) -> Tensor:
    return clip_loss(
        at_level(batch, level),
        advantages(batch),
        eps_clip=LOW,
        eps_clip_high=HIGH,
        dual_clip=delta,
        dual_side="both",
    ).pg_loss


def cispo(batch: Batch, level: str, delta: float | None) -> Tensor:
    return cispo_loss(
        batch.packed(batch.log_probs),
        at_level(batch, level),
        advantages(batch),
        bounds="upper-absolute",
        eps_clip_high=HIGH,
    ).pg_loss


def sapo(batch: Batch, level: str, delta: float | None) -> Tensor:
    return sapo_loss(at_level(batch, level), advantages(batch)).pg_loss


def vespo(batch: Batch, level: str, delta: float | None) -> Tensor:
    return vespo_loss(
        batch.packed(batch.log_probs),
        ratio(batch),
        advantages(batch),
        batch.flat_mask,
        batch.offsets,
        rollout_weights=batch.packed(batch.weights) if delta else None,
    ).pg_loss


def over_samples(tokens: Tensor, batch: Batch, *, sums: bool = False) -> Tensor:
    kind = "sum" if sums else "mean"
    found = replayed_mean(
        tokens, batch.flat_mask, batch.offsets, aggregation=f"seq-mean-token-{kind}"
    )
    return found / ACCUMULATION


def over_tokens(tokens: Tensor, batch: Batch, denominator: float | None = None) -> Tensor:
    return replayed_mean(tokens, batch.flat_mask, batch.offsets, denominator=denominator)


def over_generation(tokens: Tensor, batch: Batch) -> Tensor:
    return over_tokens(tokens, batch, GENERATED_TOKENS * ACCUMULATION / STEPS_PER_GENERATION)


Tokens = Callable[[Batch, str, float | None], Tensor]
CASES: dict[str, tuple[Tokens, Callable[[Tensor, Batch], Tensor]]] = {
    "bnpo": (clipped, lambda tokens, b: over_tokens(tokens, b) / ACCUMULATION),
    "cispo": (cispo, over_generation),
    "dapo": (clipped, over_generation),
    "dr_grpo": (
        clipped,
        lambda tokens, b: over_tokens(tokens, b, len(b.lengths) * MAX_LENGTH) / ACCUMULATION,
    ),
    "grpo": (clipped, over_samples),
    "luspo": (clipped, lambda tokens, b: over_samples(tokens, b, sums=True)),
    "sapo": (sapo, over_samples),
    "vespo": (vespo, over_generation),
}


def test_every_loss_type_and_level_is_compared(trl: Trl) -> None:
    loss = trl.grpo._compute_loss
    assert compared_strings(loss, "self.loss_type") == set(CASES)
    assert compared_strings(loss, "self.importance_sampling_level") == set(LEVELS)


def of_trl(
    trl: Trl, trainer: Any, batch: Batch, inputs: dict[str, Any], **settings: Any
) -> tuple[Tensor, dict[str, list[float]]]:
    prepared = {
        "advantages": batch.greedy_rewards,
        "old_per_token_logps": batch.old_log_probs,
        "ref_per_token_logps": batch.ref_log_probs,
        "num_items_in_batch": torch.tensor(float(GENERATED_TOKENS)),
        **inputs,
    }
    held = {
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "max_completion_length": MAX_LENGTH,
        "steps_per_generation": STEPS_PER_GENERATION,
        "current_gradient_accumulation_steps": ACCUMULATION,
        **settings,
    }
    return loss_of(trl, trainer, batch, prepared, **held)


@pytest.mark.parametrize("name", sorted(CASES))
@given(
    batch=batches(),
    level=st.sampled_from(LEVELS),
    delta=st.sampled_from([None, 2.0]),
    beta=st.sampled_from([0.0, BETA]),
    corrected=st.booleans(),
)
def test_losses_are_those_of_trl(
    trl: Trl,
    name: str,
    batch: Batch,
    level: str,
    delta: float | None,
    beta: float,
    corrected: bool,
) -> None:
    assume(level == "token" or name != "vespo")  # TRL refuses it
    per_token, reduce = CASES[name]
    tokens = per_token(batch, level, delta)
    # Masked tokens have a weight of 1, as the trainer makes them.
    weights = torch.where(batch.mask > 0, batch.weights, 1.0)
    if delta and name != "vespo":
        tokens = tokens * batch.packed(weights)
    sizes = tokens.abs()
    if beta:
        weighted = at_level(batch, level).exp() if corrected else None
        log_probs, reference = batch.packed(batch.log_probs), batch.packed(batch.ref_log_probs)
        tokens = tokens + beta * weighted_kl(log_probs, reference, weights=weighted)
        gap = log_probs - reference  # of near log-probs the terms of k3 cancel, and weights do not
        terms = (-gap).exp() + 1.0 + gap.abs()
        sizes = sizes + beta * terms * (1.0 if weighted is None else weighted)
    found, _ = of_trl(
        trl,
        trl.grpo,
        batch,
        {"importance_sampling_ratio": weights} if delta else {},
        use_vllm=bool(delta),
        loss_type=name,
        importance_sampling_level=level,
        delta=delta,
        beta=beta,
        use_bias_correction_kl=corrected,
    )
    assert_rounded(found, reduce(tokens, batch), size=sizes * MAX_LENGTH)


@given(batch=batches(), level=st.sampled_from(LEVELS))
def test_clip_fractions_are_those_of_trl(trl: Trl, batch: Batch, level: str) -> None:
    _, metrics = of_trl(trl, trl.grpo, batch, {}, loss_type="dapo", importance_sampling_level=level)
    counted = clip_loss(
        at_level(batch, level), advantages(batch), eps_clip=LOW, eps_clip_high=HIGH
    ).clipped
    if level == "token":
        fraction = over_tokens(counted, batch)
    else:
        fraction = counted[batch.offsets[:-1]].double().mean()
    assert_rounded(metrics["clip_ratio/region_mean"][0], fraction)


@given(batch=batches())
def test_off_policy_samples_are_those_of_trl(trl: Trl, batch: Batch) -> None:
    keep, divergence = off_policy_keep(
        ratio(batch), advantages(batch), batch.flat_mask, batch.offsets, threshold=THRESHOLD
    )
    assume(bool(((divergence - THRESHOLD).abs() > LEAST_MARGIN).all()))
    tokens = clipped(batch, "token", None) * keep
    found, _ = of_trl(
        trl, trl.grpo, batch, {}, loss_type="grpo", off_policy_mask_threshold=THRESHOLD
    )
    assert_rounded(found, over_samples(tokens, batch), size=tokens)


@given(batch=batches())
def test_losses_of_geometric_means_are_those_of_trl(trl: Trl, batch: Batch) -> None:
    found, _ = of_trl(trl, trl.gmpo, batch, {})
    samples = gmpo_loss(
        ratio(batch),
        advantages(batch),
        batch.flat_mask,
        batch.offsets,
        eps_clip=LOW,
        eps_clip_high=HIGH,
    ).pg_loss
    # Without a token that counts the advantage is lost to the kernel, not to TRL.
    assume(bool((batch.mask.sum(1) > 0).all()))
    assert_rounded(found, samples.double().mean() / ACCUMULATION, size=samples)


@given(batch=batches())
def test_losses_of_rloo_are_those_of_trl(trl: Trl, batch: Batch) -> None:
    old = (batch.old_log_probs * batch.mask).sum(1)
    found, _ = of_trl(trl, trl.rloo, batch, {"old_logps": old})
    samples = sequence_log_ratio(ratio(batch), batch.flat_mask, batch.offsets, form="sum")
    tokens = clip_loss(samples, advantages(batch), eps_clip=LOW, eps_clip_high=HIGH).pg_loss
    expected = tokens[batch.offsets[:-1]].double().mean()
    assert_rounded(found, expected, size=tokens)

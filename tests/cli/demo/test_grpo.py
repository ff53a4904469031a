"""The demo trainer's own arithmetic on one example worked out by hand."""

from dataclasses import fields
from math import exp, log, sqrt

import pytest
import torch

from trajreplay.cli.demo.grpo import (
    LossInputs,
    LossTerms,
    k3_divergence,
    masked_mean,
    normalize_rewards,
    sample_loss,
    total_loss,
)


def one_sample() -> LossInputs:
    """Three tokens with ratios 1.5, 0.5 and 1; the tool wrote the last one."""
    return LossInputs(
        log_probs=torch.tensor([log(0.6), log(0.1), -2.0]),
        old_log_probs=torch.tensor([log(0.4), log(0.2), -2.0]),
        entropy=torch.tensor([0.5, 0.7, 100.0]),
        advantages=torch.tensor([2.0, 2.0, 2.0]),
        loss_mask=torch.tensor([1, 1, 0]),
    )


def terms(losses: LossTerms) -> dict[str, float]:
    return {term.name: getattr(losses, term.name).item() for term in fields(losses)}


OPTIONS = {"eps_clip": 0.2, "eps_clip_high": 0.28, "entropy_coef": 0.1}


def test_rewards_are_centred_and_divided_by_the_deviation_of_their_cohort() -> None:
    normalized = normalize_rewards([3.0, 10.0, 1.0, 10.0, 7.0], ["a", "b", "a", "b", "c"])
    expected = 1 / (sqrt(2) + 1e-6)
    assert normalized == pytest.approx([expected, 0.0, -expected, 0.0, 0.0], rel=1e-6)


def test_the_k3_estimate_is_never_negative_and_zero_for_equal_policies() -> None:
    estimate = k3_divergence(torch.tensor([0.0, log(2.0), -log(2.0)]))
    assert estimate.tolist() == pytest.approx([0.0, 1 - log(2.0), log(2.0) - 0.5], rel=1e-5)


def test_the_loss_of_one_sample() -> None:
    losses = terms(sample_loss(one_sample(), **OPTIONS))
    # Positive advantage: a ratio of 1.5 is held at 1.28, one of 0.5 is not held at 0.8.
    pg_loss = (-2.0 * 1.28 + -2.0 * 0.5) / 2
    entropy_loss = (0.5 + 0.7) / 2
    assert losses == pytest.approx(
        {
            "loss": pg_loss - 0.1 * entropy_loss,
            "pg_loss": pg_loss,
            "entropy_loss": entropy_loss,
            "pg_clipfrac": 0.5,
            "ppo_kl": (log(0.4 / 0.6) + log(0.2 / 0.1)) / 2,
        },
        rel=1e-5,
    )


def test_a_negative_advantage_is_held_at_the_lower_bound() -> None:
    inputs = one_sample()
    inputs.advantages = -inputs.advantages
    assert sample_loss(inputs, **OPTIONS).pg_loss.item() == pytest.approx(
        (2.0 * 1.5 + 2.0 * 0.8) / 2
    )


def test_tokens_under_the_mask_get_no_gradient() -> None:
    inputs = one_sample()
    inputs.log_probs.requires_grad_()
    torch.autograd.backward(sample_loss(inputs, **OPTIONS).loss)
    assert inputs.log_probs.grad is not None
    # The first token is clipped and the last one masked.
    assert inputs.log_probs.grad.tolist() == pytest.approx([0.0, -0.5, 0.0])


def test_a_sample_without_a_token_that_counts_adds_nothing() -> None:
    assert masked_mean(torch.tensor([exp(1.0)]), torch.tensor([0])).item() == 0.0


def test_losses_add_up_over_the_denominator_of_the_step() -> None:
    losses = sample_loss(one_sample(), **OPTIONS)
    halves = terms(total_loss([losses, losses], denominator=4))
    assert halves == pytest.approx({name: x / 2 for name, x in terms(losses).items()})
    assert set(terms(total_loss([])).values()) == {0.0}

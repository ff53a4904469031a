import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.stages.kernels import (
    MeanError,
    policy_loss,
    policy_loss_error,
    ppo_clip,
    ppo_clip_error,
    scatter_sum,
    scatter_sum_error,
    seq_mean_token_mean,
    seq_mean_token_mean_error,
)

VALUES = pools(float32s(-100.0, 100.0))
F = np.float32


def in_torch(values: Tensor, mask: Tensor) -> float:
    return float((values * mask).sum() / mask.sum().clamp(min=1.0))


def in_numpy(values: Tensor, mask: Tensor) -> float:
    return float((values * mask).numpy().sum(dtype=F) / F(max(float(mask.sum()), 1.0)))


def one_by_one(values: Tensor, mask: Tensor) -> float:
    sums = np.cumsum(np.append(F(0), (values * mask).numpy()), dtype=F)
    return float(sums[-1] / F(max(float(mask.sum()), 1.0)))


def divided_first(values: Tensor, mask: Tensor) -> float:
    return float((values * (mask / mask.sum().clamp(min=1.0))).sum())


TRAINERS = [in_torch, in_numpy, one_by_one, divided_first]


@pytest.mark.parametrize("trainer", TRAINERS)
@given(rows=packed(max_tokens=300), pool=VALUES)
def test_float32_trainers_lie_within_the_bound(
    trainer: Callable[[Tensor, Tensor], float], rows: Packed, pool: list[float]
) -> None:
    values = rows.tensor(pool)
    exact = seq_mean_token_mean(values, rows.mask, rows.offsets)
    bound = seq_mean_token_mean_error(values, None, rows.mask, rows.offsets)
    narrow, mask = values.float(), rows.mask.float()
    trained = [
        trainer(narrow[start:stop], mask[start:stop])
        for start, stop in pairwise(rows.offsets.tolist())
    ]
    difference = (torch.tensor(trained, dtype=torch.float64) - exact.mean).abs()
    assert (difference <= bound.error).all()


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("length", [512, 2048])
def test_equal_terms_lie_within_the_bound(
    trainer: Callable[[Tensor, Tensor], float], length: int
) -> None:
    """Terms that are all the same round alike, the worst case of a sum one by one."""
    mask, offsets = torch.ones(length), torch.tensor([0, length])
    for value in (0.1, 1.2076124, 1.7):
        terms = torch.full((length,), value)
        exact = seq_mean_token_mean(terms.double(), mask, offsets).mean
        bound = seq_mean_token_mean_error(terms, None, mask, offsets).error
        assert abs(trainer(terms, mask) - exact) <= bound
        assert bound < 1e-4 * exact


@given(packed(max_tokens=100), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.01]))
def test_a_float32_training_step_lies_within_the_bounds(
    rows: Packed, seed: int, entropy_coef: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows.tokens, generator=generator)
    log_probs = old + 0.2 * torch.randn(rows.tokens, generator=generator)
    advantages = torch.randn(rows.tokens, generator=generator)
    entropy = torch.rand(rows.tokens, generator=generator)
    mask, offsets = rows.mask, rows.offsets
    ranks = torch.arange(len(rows.lengths)) % 2

    tokens = ppo_clip(log_probs.double(), old.double(), advantages.double(), eps_clip_high=0.28)
    bounds = ppo_clip_error(log_probs, old, advantages, eps_clip_high=0.28)
    fields = {
        "pg_loss": (tokens.pg_loss, bounds.pg_loss),
        "pg_clipfrac": (tokens.clipped, bounds.undecided),
        "ppo_kl": (tokens.ppo_kl, bounds.ppo_kl),
        "entropy_loss": (entropy.double(), None),
    }
    means = {
        name: seq_mean_token_mean(exact, mask, offsets).mean for name, (exact, _) in fields.items()
    }
    errors = {
        name: seq_mean_token_mean_error(exact, error, mask, offsets)
        for name, (exact, error) in fields.items()
    }
    means["loss"] = policy_loss(means["pg_loss"], means["entropy_loss"], entropy_coef=entropy_coef)
    errors["loss"] = policy_loss_error(
        errors["pg_loss"], errors["entropy_loss"], entropy_coef=entropy_coef
    )

    narrow = ppo_clip(log_probs, old, advantages, eps_clip_high=0.28)
    trained = {
        "pg_loss": narrow.pg_loss,
        "pg_clipfrac": narrow.clipped,
        "ppo_kl": old - log_probs,
        "entropy_loss": entropy,
        "loss": narrow.pg_loss - entropy_coef * entropy,
    }
    for name, values in trained.items():
        totals = [F(0), F(0)]
        for sample, (start, stop) in enumerate(pairwise(offsets.tolist())):
            mean = in_torch(values[start:stop], mask[start:stop].float())
            assert abs(mean - means[name][sample]) <= errors[name].error[sample]
            totals[sample % 2] += F(mean)
        exact_sums = scatter_sum(means[name], ranks, 2)
        sum_bound = scatter_sum_error(errors[name], ranks, 2).error
        difference = (torch.tensor(np.array(totals)).double() - exact_sums).abs()
        assert (difference <= sum_bound).all()


def test_a_token_error_without_bound_leaves_the_mean_without() -> None:
    values, offsets = torch.ones(2), torch.tensor([0, 2])
    errors = torch.tensor([math.nan, 0.0])
    masked = seq_mean_token_mean_error(values, errors, torch.tensor([0, 1]), offsets)
    assert masked.error.isfinite().all()
    trained = seq_mean_token_mean_error(values, errors, torch.tensor([1, 1]), offsets)
    assert trained.error.isnan().all()
    total = scatter_sum_error(trained, torch.zeros(1, dtype=torch.int64), 1)
    assert total.error.isnan().all()


def test_undecided_tokens_weigh_what_they_count() -> None:
    clipped, undecided = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([True, False, True, True])
    mask, offsets = torch.tensor([1, 1, 1, 0]), torch.tensor([0, 4])
    error = seq_mean_token_mean_error(clipped, undecided, mask, offsets).error
    assert error.item() == pytest.approx(2 / 3, rel=1e-5)


def test_a_sum_over_no_samples_is_exact() -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    bound = scatter_sum_error(MeanError(nothing, nothing), nothing.long(), 2)
    assert bound.error.tolist() == [0.0, 0.0]

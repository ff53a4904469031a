"""Every advantage estimator that verl registers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles.frameworks import Verl
from tests.oracles.padded import Batch, assert_rounded, batches
from trajreplay.stages.kernels import (
    decoupled_rewards,
    discounted_returns,
    gae_advantages,
    gpg_rewards,
    grpo_advantages,
    normalise_rewards,
    optimal_token_advantages,
    pass_at_k_rewards,
    remax_advantages,
    whiten,
)

pytestmark = pytest.mark.oracle

GAMMA, LAM = 0.9375, 0.875
GDPO_WEIGHTS = [1.0, 0.5]
# Whitening divides by a deviation: where that is less, it magnifies roundings.
LEAST_DEVIATION = 0.05


class Case(NamedTuple):
    """The settings that an estimator takes, and the advantages that the kernels give."""

    settings: Callable[[Batch, Verl], dict[str, Any]]
    expected: Callable[[Batch], Tensor]


def outcome(batch: Batch, verl: Verl) -> dict[str, Any]:
    return {"index": batch.uid, "config": verl.algorithm()}


def centred(batch: Batch, verl: Verl) -> dict[str, Any]:
    return {"index": batch.uid, "norm_adv_by_std_in_grpo": False}


def gae_settings(batch: Batch, verl: Verl) -> dict[str, Any]:
    return {
        "token_level_rewards": batch.token_rewards,
        "values": batch.values,
        "gamma": GAMMA,
        "lam": LAM,
    }


def gdpo_settings(batch: Batch, verl: Verl) -> dict[str, Any]:
    prompt = torch.ones(len(batch.lengths), 2)
    return {
        "index": batch.uid,
        "config": {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": GDPO_WEIGHTS},
        "non_tensor_batch": {"a": batch.components[:, 0], "b": batch.components[:, 1]},
        "batch": {
            "prompts": prompt,
            "attention_mask": torch.cat([prompt, batch.valid], 1).long(),
        },
    }


def baseline_settings(batch: Batch, verl: Verl) -> dict[str, Any]:
    return {
        "token_level_rewards": batch.token_rewards,
        "index": batch.uid,
        "old_log_probs": batch.old_log_probs,
        "sum_pi_squared": batch.values.square().clamp(max=1.0),
        "rollout_is_weights": batch.weights,
    }


def broadcast(batch: Batch, samples: Tensor) -> Tensor:
    return grpo_advantages(samples, batch.offsets.diff()) * batch.flat_mask


def grouped(batch: Batch, **options: Any) -> Tensor:
    options = {"lone": "keep", **options}
    return broadcast(batch, normalise_rewards(batch.scores, batch.group_index, **options))


def whitened(batch: Batch, tokens: Tensor, *, zero_masked: bool = True) -> Tensor:
    trained = tokens[batch.flat_mask > 0]
    assume(len(trained) > 1)
    assume(float(trained.double().std()) > LEAST_DEVIATION)
    found = whiten(tokens, batch.flat_mask)
    return torch.where(batch.flat_mask > 0, found, 0.0) if zero_masked else found


def gae(batch: Batch) -> Tensor:
    tokens = gae_advantages(
        batch.packed(batch.token_rewards),
        batch.packed(batch.values),
        batch.flat_mask,
        batch.offsets,
        gamma=GAMMA,
        lam=LAM,
        masking="carry",
    )
    return whitened(batch, tokens.advantages, zero_masked=False)


def gdpo(batch: Batch) -> Tensor:
    samples = decoupled_rewards(
        batch.components,
        torch.tensor(GDPO_WEIGHTS),
        batch.group_index,
        batch_epsilon=None,
        epsilon=1e-6,
        lone="keep",
    )
    return whitened(batch, broadcast(batch, samples))


def reinforce_plus_plus(batch: Batch) -> Tensor:
    rewards = batch.packed(batch.token_rewards)
    returns = discounted_returns(
        rewards, batch.flat_mask, batch.offsets, gamma=GAMMA, masking="carry"
    )
    return whitened(batch, returns)


def pass_at_k(batch: Batch) -> Tensor:
    assume(bool((torch.unique(batch.group_index, return_counts=True)[1] > 1).all()))
    return broadcast(batch, pass_at_k_rewards(batch.scores, batch.group_index))


def opo(batch: Batch) -> Tensor:
    return grouped(batch, baseline="length-weighted", lengths=batch.mask.sum(1))


def token_baseline(batch: Batch, *, dense: bool = False) -> Tensor:
    """Take the baseline at each position or, if dense, with masked tokens cut out."""
    kept = batch.valid & (batch.mask > 0) if dense else batch.valid
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), kept.sum(1).cumsum(0)])
    sums = batch.values.square().clamp(max=1.0)
    result = torch.zeros_like(batch.mask)
    result[kept] = optimal_token_advantages(
        batch.token_rewards[kept],
        batch.old_log_probs[kept],
        sums[kept],
        batch.mask[kept],
        batch.group_index,
        offsets,
        weights=batch.weights[kept],
    )
    return batch.packed(result)


def remax(batch: Batch) -> Tensor:
    return remax_advantages(
        batch.packed(batch.token_rewards), batch.greedy_rewards, batch.flat_mask, batch.offsets
    )


CASES = {
    "gae": Case(gae_settings, gae),
    "gdpo": Case(gdpo_settings, gdpo),
    "gpg": Case(outcome, lambda b: broadcast(b, gpg_rewards(b.scores, b.group_index))),
    "grpo": Case(outcome, lambda b: grouped(b, divisor="std")),
    "grpo_passk": Case(outcome, pass_at_k),
    "grpo_vectorized": Case(outcome, lambda b: grouped(b, divisor="std")),
    "opo": Case(outcome, opo),
    "optimal_token_baseline": Case(baseline_settings, token_baseline),
    "reinforce_plus_plus": Case(
        lambda b, verl: {
            "token_level_rewards": b.token_rewards,
            "config": verl.algorithm(gamma=GAMMA),
        },
        reinforce_plus_plus,
    ),
    "reinforce_plus_plus_baseline": Case(outcome, lambda b: whitened(b, grouped(b))),
    "remax": Case(
        lambda b, _: {
            "token_level_rewards": b.token_rewards,
            "reward_baselines": b.greedy_rewards,
        },
        remax,
    ),
    "rloo": Case(outcome, lambda b: grouped(b, baseline="leave-one-out")),
    "rloo_vectorized": Case(outcome, lambda b: grouped(b, baseline="leave-one-out", lone="zero")),
    "tir_optimal_token_baseline": Case(baseline_settings, lambda b: token_baseline(b, dense=True)),
}
LEFT_OUT: dict[str, str] = {}


def test_every_registered_estimator_is_compared_or_left_out_for_a_reason(verl: Verl) -> None:
    assert set(verl.core.ADV_ESTIMATOR_REGISTRY) == set(CASES) | set(LEFT_OUT)


def check(verl: Verl, name: str, batch: Batch, settings: dict[str, Any], expected: Tensor) -> None:
    arguments = {"token_level_rewards": batch.rewards, "response_mask": batch.mask, **settings}
    # verl writes into what it is given.
    given_to_verl = {
        key: one.clone() if isinstance(one, Tensor) else one for key, one in arguments.items()
    }
    found, _ = verl.core.ADV_ESTIMATOR_REGISTRY[name](**given_to_verl)
    assert_rounded(batch.packed(found), expected)


@pytest.mark.parametrize("name", sorted(CASES))
@given(batch=batches(all_trained=True))
def test_advantages_are_those_of_verl(verl: Verl, name: str, batch: Batch) -> None:
    case = CASES[name]
    check(verl, name, batch, case.settings(batch, verl), case.expected(batch))


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
@given(batch=batches())
def test_advantages_without_a_divisor_are_those_of_verl(
    verl: Verl, name: str, batch: Batch
) -> None:
    check(verl, name, batch, centred(batch, verl), grouped(batch))


@given(batch=batches(), gamma=st.sampled_from([0.0, 0.5, 1.0]), lam=st.sampled_from([0.0, 0.5, 1]))
def test_returns_are_those_of_verl(verl: Verl, batch: Batch, gamma: float, lam: float) -> None:
    assume(float(batch.mask.sum()) > 1)
    rewards = batch.packed(batch.token_rewards)
    _, found = verl.core.compute_gae_advantage_return(
        batch.token_rewards, batch.values, batch.mask, gamma, lam
    )
    expected = gae_advantages(
        rewards,
        batch.packed(batch.values),
        batch.flat_mask,
        batch.offsets,
        gamma=gamma,
        lam=lam,
        masking="carry",
    )
    assert_rounded(batch.packed(found), expected.returns)
    _, found = verl.core.compute_reinforce_plus_plus_outcome_advantage(
        batch.token_rewards, batch.mask, config=verl.algorithm(gamma=gamma)
    )
    returns = discounted_returns(
        rewards, batch.flat_mask, batch.offsets, gamma=gamma, masking="carry"
    )
    assert_rounded(batch.packed(found), returns)

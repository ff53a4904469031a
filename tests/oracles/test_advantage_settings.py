"""Advantages as settings name them: what they make of rewards is what verl makes of them."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from tests.oracles.frameworks import Verl
from tests.oracles.padded import Batch, assert_rounded, batches
from tests.oracles.test_advantages import CASES as KERNELS
from tests.oracles.test_advantages import GAMMA, GDPO_WEIGHTS, LAM, LEAST_DEVIATION
from trajreplay import profile, with_changes
from trajreplay.stages.compose import (
    AdvantageInputs,
    Estimate,
    LossInputs,
    RewardInputs,
    estimate_advantages,
    processed_rewards,
    rollout_weights,
)

pytestmark = pytest.mark.oracle

CENTRED = {"reward.divide_by_std": False}
WHITE = {"advantage.whiten": "cohort"}
TOKENS = {
    "reward.grouping": "none",
    "advantage.reward_source": "token",
    "advantage.masking": "carry",
    "advantage.gamma": GAMMA,
}
BY_TOKEN = {"reward.grouping": "none", "advantage.reward_source": "token"}
OTB = {**BY_TOKEN, "advantage.estimator": "otb", "advantage.otb_weights": "correction"}
# Weights as they are; of the logarithms that are given, which are those of verl's weights.
FREE = {"loss.correction": "tis", "loss.correction_bounds": (0.0, math.inf)}
# What is changed of the profile of verl.
CASES: dict[str, dict[str, Any]] = {
    "gae": {**TOKENS, **WHITE, "advantage.estimator": "gae", "advantage.lam": LAM},
    "gdpo": {
        **WHITE,
        "reward.weights": dict(zip("ab", GDPO_WEIGHTS, strict=True)),
        "reward.combination": "normalise-then-sum",
    },
    "gpg": {**CENTRED, "reward.rule": "gpg"},
    "grpo": {},
    "grpo_passk": {"reward.rule": "pass@k"},
    "grpo_vectorized": {},
    "opo": {**CENTRED, "reward.baseline": "length-weighted"},
    "optimal_token_baseline": OTB,
    "tir_optimal_token_baseline": {**OTB, "advantage.otb_positions": "trained"},
    "reinforce_plus_plus": {**TOKENS, **WHITE, "advantage.estimator": "reinforce++"},
    "reinforce_plus_plus_baseline": {
        **CENTRED,
        **WHITE,
        "advantage.estimator": "reinforce++-baseline",
    },
    "remax": {**BY_TOKEN, "advantage.estimator": "remax"},
    "rloo": {**CENTRED, "reward.baseline": "leave-one-out"},
    "rloo_vectorized": {**CENTRED, "reward.baseline": "leave-one-out", "reward.lone": "zero"},
}
LEFT_OUT: dict[str, str] = {}


def estimated(batch: Batch, changes: dict[str, Any]) -> Estimate:
    """The advantages and returns that the settings make of a batch, as the replay does."""
    settings = with_changes(profile("verl").settings, FREE | changes)
    raw = batch.components if settings.reward.weights else batch.scores
    trained = batch.mask.sum(1)
    given = RewardInputs(batch.group_index, batch.one_set, batch.lengths, trained.double())
    sums = batch.values.square().clamp(max=1.0)
    weights = None
    if settings.advantage.otb_weights == "correction":
        old = batch.packed(batch.old_log_probs)
        columns = {
            "old_log_probs": old,
            "rollout_log_probs": old - batch.packed(batch.weights).log(),
        }
        given_loss = LossInputs(columns, batch.flat_mask > 0, batch.offsets)
        weights = rollout_weights(settings.loss, given_loss)
    return estimate_advantages(
        settings.advantage,
        AdvantageInputs(
            batch.flat_mask > 0,
            batch.offsets,
            reward=processed_rewards(settings.reward, raw, given),
            whitened_with=torch.zeros(int(batch.lengths.sum()), dtype=torch.int64),
            values=batch.packed(batch.values),
            token_rewards=batch.packed(batch.token_rewards),
            greedy=batch.greedy_rewards,
            group=batch.group_index,
            policy=batch.packed(batch.old_log_probs),
            sum_pi_squared=batch.packed(sums),
            weights=weights,
        ),
    )


def test_every_registered_estimator_is_named_by_settings_or_left_out(verl: Verl) -> None:
    assert set(verl.core.ADV_ESTIMATOR_REGISTRY) == set(CASES) | set(LEFT_OUT)


@pytest.mark.parametrize("name", sorted(CASES))
@given(batch=batches(all_trained=True))
def test_advantages_by_settings_are_those_of_verl(verl: Verl, name: str, batch: Batch) -> None:
    if name == "grpo_passk":
        assume(bool((torch.unique(batch.group_index, return_counts=True)[1] > 1).all()))
    counted, changes = batch.flat_mask > 0, CASES[name]
    if "advantage.whiten" in changes:
        plain = estimated(batch, {**changes, "advantage.whiten": "none"}).advantages[counted]
        assume(len(plain) > 1)
        assume(float(plain.double().std()) > LEAST_DEVIATION)
    settings = KERNELS[name].settings(batch, verl)
    arguments = {"token_level_rewards": batch.rewards, "response_mask": batch.mask, **settings}
    # verl writes into what it is given.
    copies = {
        key: one.clone() if isinstance(one, Tensor) else one for key, one in arguments.items()
    }
    found = verl.core.ADV_ESTIMATOR_REGISTRY[name](**copies)
    for theirs, ours in zip(found, estimated(batch, changes), strict=True):
        assert_rounded(batch.packed(theirs)[counted], ours[counted])

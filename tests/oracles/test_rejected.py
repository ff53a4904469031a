"""What verl's rejection leaves to the critic and to the advantages: it changes the mask of both."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.replayed_means import replayed_mean
from tests.oracles.frameworks import Verl
from tests.oracles.padded import Batch, assert_rounded, batches
from tests.oracles.test_advantages import GAMMA, LAM, LEAST_DEVIATION
from tests.oracles.test_corrections import OPTIONS, given_of, kept, rejecting, threshold
from trajreplay import profile, with_changes
from trajreplay.schema import Settings
from trajreplay.stages.compose import (
    AdvantageInputs,
    estimate_advantages,
    kept_tokens,
    value_terms,
    value_tokens,
)

pytestmark = pytest.mark.oracle

CLIP = 0.5
BY_TOKEN = {
    "advantage.counts": "kept",
    "advantage.reward_source": "token",
    "advantage.masking": "carry",
    "advantage.gamma": GAMMA,
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {**BY_TOKEN, "advantage.estimator": "gae", "advantage.lam": LAM},
    "reinforce_plus_plus": {**BY_TOKEN, "advantage.estimator": "reinforce++"},
}


def settings_of(option: str, changes: dict[str, Any]) -> Settings:
    loss = {f"loss.{name}": value for name, value in rejecting(option).items()}
    return with_changes(profile("verl").settings, {**loss, **changes})


def rejected(verl: Verl, batch: Batch, option: str) -> Any:
    """The mask that verl gives to everything that comes after."""
    kept(batch, option)  # away from its bounds
    mask, _ = verl.correction.compute_rollout_rejection_mask(
        batch.log_probs - batch.old_log_probs, batch.mask, option, threshold(option)
    )
    return mask


@given(batch=batches(), option=st.sampled_from(OPTIONS))
def test_the_value_loss_counts_what_is_kept(verl: Verl, batch: Batch, option: str) -> None:
    mask = rejected(verl, batch, option)
    assume(bool(mask.any()))
    old, returns = batch.values, batch.advantages
    loss, fraction = verl.core.compute_value_loss(
        vpreds=batch.token_rewards,
        returns=returns,
        values=old,
        response_mask=mask,
        cliprange_value=CLIP,
        loss_agg_mode="token-mean",
    )
    settings = settings_of(option, {"value.counts": "kept", "value.clip": CLIP})
    counted = value_tokens(settings, given_of(batch))
    columns = {
        "values": batch.packed(batch.token_rewards),
        "old_values": batch.packed(old),
        "returns": batch.packed(returns),
    }
    terms = value_terms(settings.value, columns)
    for name, found in (("value_loss", loss), ("value_clipfrac", fraction)):
        expected = replayed_mean(terms[name], counted, batch.offsets)
        assert_rounded(found, expected, size=terms[name])


@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches(), option=st.sampled_from(OPTIONS))
def test_advantages_and_returns_are_of_what_is_kept(
    verl: Verl, name: str, batch: Batch, option: str
) -> None:
    settings = settings_of(option, {**ESTIMATORS[name], "advantage.whiten": "cohort"})
    given_to_loss = given_of(batch)
    counted = kept_tokens(settings.loss, given_to_loss)
    assert counted is not None
    mask = rejected(verl, batch, option)
    assert (batch.packed(mask) > 0).equal(counted)
    assume(int(counted.sum()) > 1)

    def estimated(settings: Settings) -> Any:
        return estimate_advantages(
            settings.advantage,
            AdvantageInputs(
                counted,
                batch.offsets,
                whitened_with=torch.zeros(int(batch.lengths.sum()), dtype=torch.int64),
                values=batch.packed(batch.values),
                token_rewards=batch.packed(batch.token_rewards),
                trained=given_to_loss.mask,
            ),
        )

    plain = estimated(with_changes(settings, {"advantage.whiten": "none"})).advantages[counted]
    assume(float(plain.double().std()) > LEAST_DEVIATION)
    options = {
        "gae": {"values": batch.values, "gamma": GAMMA, "lam": LAM},
        "reinforce_plus_plus": {"config": verl.algorithm(gamma=GAMMA)},
    }[name]
    advantages, returns = verl.core.ADV_ESTIMATOR_REGISTRY[name](
        token_level_rewards=batch.token_rewards.clone(), response_mask=mask, **options
    )
    found = estimated(settings)
    assert_rounded(batch.packed(advantages)[counted], found.advantages[counted])
    assert_rounded(batch.packed(returns)[counted], found.returns[counted])

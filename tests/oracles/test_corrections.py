"""verl's corrections for the rollout: weights, rejection, and the loss that applies both."""

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles.aggregation import MODES, aggregate
from tests.oracles.frameworks import Verl, compared_strings
from tests.oracles.padded import Batch, assert_rounded, batches
from trajreplay import ParallelCoordinates, profile, with_changes
from trajreplay.schema import LossSettings
from trajreplay.stages.capability import ability
from trajreplay.stages.compose import policy_terms
from trajreplay.stages.compose.corrections import kept_tokens, rollout_weights
from trajreplay.stages.compose.surrogates import LossInputs
from trajreplay.stages.kernels import (
    DivergenceKeep,
    bound_weights,
    divergence_keep,
    importance_weights,
    log_ratio,
    normalised_weights,
)

pytestmark = pytest.mark.oracle

CLAMP = (-20.0, 20.0)
LOW, HIGH = 0.5, 2.0
K1_BOUNDS = (0.5, 5.0)
LEVELS = ("sequence", "token")
LOSS_TYPES = ("ppo_clip", "reinforce")
STATISTICS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
OPTIONS = (
    "seq_max_k2",
    "seq_max_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "token_k1",
    "token_k2",
    "token_k3",
)
# A criterion nearer to a bound than this may pass it by a rounding of float32.
LEAST_MARGIN = 1e-3


def log_weights(batch: Batch) -> Tensor:
    return log_ratio(batch.packed(batch.log_probs), batch.packed(batch.old_log_probs))


def assume_apart(criterion: Tensor, *bounds: float) -> None:
    for bound in bounds:
        assume(bool(((criterion - bound).abs() > LEAST_MARGIN).all()))


def weights_of(batch: Batch, *, level: str, low: float | None, normalise: bool) -> Tensor:
    raw = importance_weights(
        log_weights(batch), batch.flat_mask, batch.offsets, level=level, clamp=CLAMP
    )
    assume_apart(raw, HIGH, *([] if low is None else [low]))
    action = "truncate" if low is None else "zero"
    weights = bound_weights(raw, low=low, high=HIGH, action=action).weight
    if not normalise:
        return weights
    return normalised_weights(weights, batch.flat_mask, batch.offsets, level=level)


def kept(batch: Batch, option: str) -> DivergenceKeep:
    statistic, _, metric = option.rpartition("_")
    low, high = (math.log(bound) for bound in K1_BOUNDS)
    bounds: dict[str, Any] = {"low": low, "high": high} if metric == "k1" else {"high": HIGH}
    found = divergence_keep(
        log_weights(batch),
        batch.flat_mask,
        batch.offsets,
        metric=metric,
        statistic=STATISTICS[statistic],
        reverse=True,
        log_ratio_clamp=CLAMP,
        epsilon=1e-8,
        **bounds,
    )
    assume_apart(found.criterion, *bounds.values())
    return found


def threshold(option: str) -> str:
    return f"{K1_BOUNDS[0]}_{K1_BOUNDS[1]}" if option.endswith("k1") else str(HIGH)


def test_every_option_is_compared(verl: Verl) -> None:
    weights = verl.correction.compute_rollout_correction_weights
    assert compared_strings(weights, "rollout_is") == set(LEVELS)
    assert set(OPTIONS) == verl.correction.SUPPORTED_ROLLOUT_RS_OPTIONS
    bypass = verl.core.compute_policy_loss_bypass_mode
    assert compared_strings(bypass, "loss_type") == set(LOSS_TYPES)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("low", [None, LOW])
@pytest.mark.parametrize("level", LEVELS)
@given(batch=batches())
def test_weights_are_those_of_verl(
    verl: Verl, level: str, low: float | None, normalise: bool, batch: Batch
) -> None:
    expected = weights_of(batch, level=level, low=low, normalise=normalise)
    # verl 0.9.1 divides by zero for a metric where all weights of a batch are 0.
    assume(bool((expected * batch.flat_mask).any()))
    found, _ = verl.correction.compute_rollout_correction_weights(
        batch.log_probs - batch.old_log_probs,
        batch.mask,
        level,
        HIGH if low is None else f"{low}_{HIGH}",
        normalise,
    )
    # verl makes the weights of masked tokens 0.
    assert_rounded(batch.packed(found), expected * batch.flat_mask)


@pytest.mark.parametrize("option", OPTIONS)
@given(batch=batches())
def test_rejected_tokens_are_those_of_verl(verl: Verl, option: str, batch: Batch) -> None:
    expected = kept(batch, option)
    found, metrics = verl.correction.compute_rollout_rejection_mask(
        batch.log_probs - batch.old_log_probs, batch.mask, option, threshold(option)
    )
    assert batch.packed(found).equal(expected.keep * batch.flat_mask)
    mean = expected.criterion[batch.flat_mask > 0].double().mean()
    assert_rounded(
        metrics[f"rollout_rs_{option}_mean"], mean, size=expected.criterion * batch.flat_mask
    )


def rejecting(*options: str) -> dict[str, Any]:
    """The settings that say what options of verl do."""
    k1 = tuple(map(math.log, K1_BOUNDS))
    criteria = {}
    for option in options:
        statistic, _, metric = option.rpartition("_")
        bounds = k1 if metric == "k1" else (-math.inf, HIGH)
        criteria[f"{STATISTICS[statistic]}-{metric}"] = bounds
    return {
        "rejection": criteria,
        "rejection_reverse": True,
        "rejection_log_clamp": CLAMP,
        "rejection_denominator": "kept",
        "count_epsilon": 1e-8,
    }


CORRECTIONS = {
    ("token", None): "tis",
    ("token", LOW): "icepop",
    ("sequence", None): "sequence-tis",
    ("sequence", LOW): "sequence-mask",
}


def given_of(batch: Batch) -> LossInputs:
    """Columns whose old against rollout log-probs are the weights of the other tests."""
    columns = {
        "old_log_probs": batch.packed(batch.log_probs),
        "rollout_log_probs": batch.packed(batch.old_log_probs),
    }
    return LossInputs(columns, batch.flat_mask > 0, batch.offsets)


@pytest.mark.parametrize("norm", ["none", "same"])
@pytest.mark.parametrize(("level", "low"), CORRECTIONS)
@given(batch=batches())
def test_settings_give_the_weights_of_kernels(
    level: str, low: float | None, norm: str, batch: Batch
) -> None:
    settings = LossSettings(
        correction=CORRECTIONS[level, low],
        correction_bounds=(-math.inf if low is None else low, HIGH),
        correction_log_clamp=CLAMP,
        correction_norm="none" if norm == "none" else level,
    )
    found = rollout_weights(settings, given_of(batch))
    assert found is not None
    assert found.equal(weights_of(batch, level=level, low=low, normalise=norm != "none"))


@pytest.mark.parametrize("option", OPTIONS)
@given(batch=batches())
def test_settings_give_the_rejections_of_kernels(option: str, batch: Batch) -> None:
    settings = LossSettings(**rejecting(option))
    found = kept_tokens(settings, given_of(batch))
    assert found is not None
    assert found.equal(kept(batch, option).keep & (batch.flat_mask > 0))


@given(batch=batches(), options=st.lists(st.sampled_from(OPTIONS), unique=True, min_size=2))
def test_several_options_reject_what_they_do_in_verl(
    verl: Verl, batch: Batch, options: list[str]
) -> None:
    for option in options:
        kept(batch, option)  # away from its bounds
    found, _ = verl.correction.compute_rollout_rejection_mask(
        batch.log_probs - batch.old_log_probs,
        batch.mask,
        ",".join(options),
        ",".join(map(threshold, options)),
    )
    expected = kept_tokens(LossSettings(**rejecting(*options)), given_of(batch))
    assert expected is not None
    assert (batch.packed(found) > 0).equal(expected)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@given(
    batch=batches(),
    mode=st.sampled_from(MODES),
    level=st.sampled_from([None, *LEVELS]),
    option=st.sampled_from([None, *OPTIONS]),
)
def test_losses_in_bypass_mode_are_those_of_verl(
    verl: Verl, loss_type: str, batch: Batch, mode: str, level: str | None, option: str | None
) -> None:
    changes: dict[str, Any] = {"loss.proximal": "current", "loss.old_source": "rollout"}
    if loss_type == "reinforce":
        changes["loss.surrogate"], changes["loss.dual_clip"] = "reinforce", None
        if level is not None:
            weights_of(batch, level=level, low=None, normalise=False)  # away from its bounds
            changes["loss.correction"] = CORRECTIONS[level, None]
            changes["loss.correction_bounds"] = (-math.inf, HIGH)
            changes["loss.correction_log_clamp"] = CLAMP
    if option is not None:
        kept(batch, option)
        changes |= {f"loss.{name}": value for name, value in rejecting(option).items()}
    settings = with_changes(profile("verl").settings, changes)
    log_probs = batch.packed(batch.log_probs)
    columns = {
        "log_probs": log_probs,
        "old_log_probs": log_probs.detach(),
        "rollout_log_probs": batch.packed(batch.old_log_probs),
        "advantages": batch.packed(batch.advantages),
    }
    can = ability("loss.policy", settings, ParallelCoordinates(), columns)
    assert can.capability == "recompute", can.reason
    terms = policy_terms(settings.loss, LossInputs(columns, batch.flat_mask > 0, batch.offsets))
    tokens, mask = terms.terms["pg_loss"], terms.summed.to(batch.flat_mask.dtype)
    corrections = {
        "loss_type": loss_type,
        "rollout_is": level,
        "rollout_is_threshold": HIGH,
        "rollout_rs": option,
        "rollout_rs_threshold": None if option is None else threshold(option),
    }
    found, _ = verl.core.compute_policy_loss_bypass_mode(
        batch.old_log_probs,
        batch.log_probs,
        batch.advantages,
        batch.mask,
        mode,
        verl.actor_config(policy_loss={"rollout_correction": corrections}),
    )
    assert_rounded(found, aggregate(tokens, batch, mode, mask=mask), size=tokens)

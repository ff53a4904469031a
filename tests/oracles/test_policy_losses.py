"""Every policy loss that verl registers, with a drawn aggregation, weights and bounds."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.replayed_means import replayed_mean
from tests.oracles.aggregation import MODES, aggregate
from tests.oracles.frameworks import Verl
from tests.oracles.padded import Batch, assert_rounded, batches
from trajreplay.schema import LossSettings
from trajreplay.stages.compose import LossInputs, policy_terms
from trajreplay.stages.kernels import (
    cispo_loss,
    clip_loss,
    dppo_gate,
    gmpo_loss,
    importance_weights,
    kl_cov_loss,
    log_ratio,
    policy_gradient_loss,
    sapo_loss,
    sequence_log_ratio,
    weighted_kl,
)

pytestmark = pytest.mark.oracle

CLAMP = (-20.0, 20.0)
LOW, HIGH, DUAL = 0.1875, 0.28125, 3.0
KL_COV_FRACTION, KL_COV_COEF = 0.25, 0.125
DRO_BETA = 0.25
DPPO: dict[str, Any] = {
    "surrogate": "dppo",
    "dppo_form": "log-prob",
    "dppo_ratio_cap": DUAL,
    "log_ratio_clamp": CLAMP,
}
# kl_cov gates the largest covariances: those nearer than this may change places by rounding.
LEAST_GAP = 1e-3


class Loss(NamedTuple):
    """The loss of each token, and 1 where verl counts it as clipped, if it does."""

    tokens: Tensor
    clipped: Tensor | None = None


class Case(NamedTuple):
    """The loss that kernels give, the settings that verl takes, and the aggregation if fixed."""

    tokens: Callable[[Batch], Loss]
    policy_loss: Mapping[str, Any] = MappingProxyType({})
    mode: str | None = None


def ratio(batch: Batch, *, clamp: tuple[float, float] | None = CLAMP) -> Tensor:
    return log_ratio(batch.packed(batch.log_probs), batch.packed(batch.old_log_probs), clamp=clamp)


def vanilla(batch: Batch) -> Loss:
    tokens = clip_loss(
        ratio(batch),
        batch.packed(batch.advantages),
        eps_clip=LOW,
        eps_clip_high=HIGH,
        dual_clip=DUAL,
    )
    return Loss(tokens.pg_loss, tokens.clipped)


def dppo(batch: Batch, measure: str = "difference") -> Loss:
    log_probs, advantages = batch.packed(batch.log_probs), batch.packed(batch.advantages)
    old = batch.packed(batch.old_log_probs)
    bounds: dict[str, Any] = {"low": LOW, "high": HIGH}
    gated = dppo_gate(log_probs, old, advantages, measure=measure, **bounds)
    wide = dppo_gate(
        log_probs.double(), old.double(), advantages.double(), measure=measure, **bounds
    )
    assume(gated.equal(wide))  # else rounding decides
    weighted = cispo_loss(
        log_probs, ratio(batch), advantages, bounds="upper-absolute", eps_clip_high=DUAL
    )
    return Loss(torch.where(gated, 0.0, weighted.pg_loss), gated.float())


def gspo(batch: Batch) -> Loss:
    samples = sequence_log_ratio(
        ratio(batch, clamp=None), batch.flat_mask, batch.offsets, clamp=(-torch.inf, 10.0)
    )
    advantages = batch.packed(batch.advantages)
    tokens = clip_loss(samples, advantages, eps_clip=LOW, eps_clip_high=HIGH)
    return Loss(tokens.pg_loss)


def sapo(batch: Batch) -> Loss:
    return Loss(sapo_loss(ratio(batch), batch.packed(batch.advantages)).pg_loss)


def gpg(batch: Batch) -> Loss:
    log_probs = batch.packed(batch.log_probs)
    return Loss(policy_gradient_loss(log_probs, batch.packed(batch.advantages)))


def dro(batch: Batch) -> Loss:
    square = weighted_kl(
        batch.packed(batch.log_probs), batch.packed(batch.old_log_probs), estimator="k2"
    )
    return Loss(gpg(batch).tokens + DRO_BETA * square)


def cispo(batch: Batch) -> Loss:
    tokens = cispo_loss(
        batch.packed(batch.log_probs),
        ratio(batch),
        batch.packed(batch.advantages),
        eps_clip=LOW,
        eps_clip_high=HIGH,
    )
    return Loss(tokens.pg_loss, tokens.clipped)


def kl_cov(batch: Batch) -> Loss:
    log_probs, advantages = batch.packed(batch.log_probs), batch.packed(batch.advantages)
    trained = batch.flat_mask > 0
    one, other = (each[trained].double() for each in (log_probs, advantages))
    ranked = ((one - one.mean()) * (other - other.mean())).sort().values
    assume(bool((ranked.diff() > LEAST_GAP * (1.0 + ranked.abs().max())).all()))
    tokens = kl_cov_loss(
        log_probs,
        ratio(batch, clamp=None),
        advantages,
        batch.flat_mask,
        batch.offsets,
        fraction=KL_COV_FRACTION,
        kl_coef=KL_COV_COEF,
    )
    return Loss(tokens.pg_loss)


CASES = {
    "cispo": Case(cispo),
    "dppo_kl": Case(lambda batch: dppo(batch, "binary-kl")),
    "dppo_tv": Case(dppo),
    "dro": Case(dro, {"dro_beta": DRO_BETA}),
    "gpg": Case(gpg),
    "gspo": Case(gspo),
    "kl_cov": Case(kl_cov, {"kl_cov_ratio": KL_COV_FRACTION, "ppo_kl_coef": KL_COV_COEF}),
    "sapo": Case(sapo, mode="seq-mean-token-mean"),
    "vanilla": Case(vanilla),
}
ELSEWHERE = {
    "bypass_mode": "compared in test_corrections.py, of which it is composed",
    "geo_mean": "compared below: it scores samples, whatever the aggregation",
}
LEFT_OUT = {
    "clip_cov": "draws the tokens that it leaves out at random",
}


def test_every_registered_loss_is_compared_or_left_out_for_a_reason(verl: Verl) -> None:
    known = [set(CASES), set(ELSEWHERE), set(LEFT_OUT)]
    assert set(verl.core.POLICY_LOSS_REGISTRY) == set().union(*known)


def of_verl(
    verl: Verl, name: str, batch: Batch, mode: str, weights: Tensor | None, **policy_loss: Any
) -> tuple[Tensor, dict[str, float]]:
    config = verl.actor_config(
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=DUAL,
        policy_loss={"loss_mode": name, **policy_loss},
    )
    loss, metrics = verl.core.get_policy_loss_fn(name)(
        batch.old_log_probs,
        batch.log_probs,
        batch.advantages,
        batch.mask,
        mode,
        config,
        weights,
    )
    return loss, metrics


@pytest.mark.parametrize("name", sorted(CASES))
@given(batch=batches(), mode=st.sampled_from(MODES), weighted=st.booleans())
def test_losses_are_those_of_verl(
    verl: Verl, name: str, batch: Batch, mode: str, weighted: bool
) -> None:
    case = CASES[name]
    tokens = case.tokens(batch).tokens
    if weighted:
        tokens = tokens * batch.packed(batch.weights)
    weights = batch.weights if weighted else None
    found, _ = of_verl(verl, name, batch, mode, weights, **case.policy_loss)
    expected = aggregate(tokens, batch, case.mode or mode)
    assert_rounded(found, expected, size=tokens)


# What a user names to say the same; `ratio` and bounds are those of the other cases.
SETTINGS: dict[str, dict[str, Any]] = {
    "cispo": {"surrogate": "cispo", "log_ratio_clamp": CLAMP},
    "dppo_kl": {**DPPO, "dppo_measure": "binary-kl"},
    "dppo_tv": DPPO,
    "dro": {"surrogate": "dro", "dro_beta": DRO_BETA},
    "gpg": {"surrogate": "reinforce"},
    "gspo": {"ratio": "sequence-mean", "sequence_log_ratio_clamp": (-math.inf, 10.0)},
    "kl_cov": {
        "surrogate": "kl-cov",
        "kl_cov_fraction": KL_COV_FRACTION,
        "kl_cov_coef": KL_COV_COEF,
    },
    "sapo": {"surrogate": "sapo", "log_ratio_clamp": CLAMP},
    "vanilla": {"dual_clip": DUAL, "log_ratio_clamp": CLAMP},
}


def test_every_case_can_be_named_by_settings() -> None:
    assert SETTINGS.keys() == CASES.keys()


@pytest.mark.parametrize("name", sorted(SETTINGS))
@given(batch=batches())
def test_settings_give_the_losses_of_kernels(name: str, batch: Batch) -> None:
    names = ("log_probs", "old_log_probs", "advantages")
    columns = {one: batch.packed(getattr(batch, one)) for one in names}
    settings = LossSettings(eps_clip=LOW, eps_clip_high=HIGH, **SETTINGS[name])
    found = policy_terms(settings, LossInputs(columns, batch.flat_mask > 0, batch.offsets))
    expected = CASES[name].tokens(batch)
    assert_rounded(found.terms["pg_loss"], expected.tokens, size=expected.tokens)
    if expected.clipped is not None:
        assert found.terms["pg_clipfrac"].equal(expected.clipped)


@pytest.mark.parametrize("name", ["cispo", "dppo_kl", "dppo_tv", "vanilla"])
@given(batch=batches())
def test_clip_fractions_are_those_of_verl(verl: Verl, name: str, batch: Batch) -> None:
    _, metrics = of_verl(verl, name, batch, "token-mean", None)
    clipped = CASES[name].tokens(batch).clipped
    assert clipped is not None
    fraction = replayed_mean(clipped, batch.flat_mask, batch.offsets, count_epsilon=1e-8)
    assert_rounded(metrics["actor/pg_clipfrac"], fraction)


@given(batch=batches(), mode=st.sampled_from(MODES), weighted=st.booleans())
def test_the_loss_of_geometric_means_is_that_of_verl(
    verl: Verl, batch: Batch, mode: str, weighted: bool
) -> None:
    weights = batch.weights if weighted else None
    found, metrics = of_verl(verl, "geo_mean", batch, mode, weights)
    samples = gmpo_loss(
        ratio(batch, clamp=None),
        batch.packed(batch.advantages),
        batch.flat_mask,
        batch.offsets,
        eps_clip=LOW,
        eps_clip_high=HIGH,
        epsilon=1e-8,
    )
    loss = samples.pg_loss
    if weighted:
        logs = batch.packed((batch.weights + 1e-10).log())
        means = importance_weights(
            logs, batch.flat_mask, batch.offsets, level="geometric", epsilon=1e-8
        )
        loss = loss * means[batch.offsets[:-1]]
    assert_rounded(found, loss.double().mean(), size=loss)
    for key, clipped in (
        ("actor/pg_clipfrac", samples.clipped),
        ("actor/pg_clipfrac_lower", samples.clipped_low),
    ):
        fraction = replayed_mean(clipped, batch.flat_mask, batch.offsets)
        assert_rounded(metrics[key], fraction)

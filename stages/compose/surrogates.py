"""The surrogate of the policy loss at each token, as its settings say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trajreplay.schema import LossSettings
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.kernels.clipping import cispo_loss, clip_loss, policy_gradient_loss
from trajreplay.stages.kernels.dppo import dppo_gate, dppo_loss
from trajreplay.stages.kernels.gates import (
    Undecided,
    kl_cov_loss,
    kl_cov_undecided,
    sapo_loss,
)
from trajreplay.stages.kernels.m2po import m2po_loss
from trajreplay.stages.kernels.masked import sample_values, spread
from trajreplay.stages.kernels.ratio import log_ratio, sequence_log_ratio
from trajreplay.stages.kernels.sample_losses import gmpo_loss, vespo_loss
from trajreplay.stages.kernels.sets import number_of_sets

_SEQUENCE_FORMS = {"sequence-mean": "mean", "sequence-sum": "sum"}


@dataclass(frozen=True)
class LossInputs:
    """What the terms of a policy loss are made of.

    Args:
        columns: (N,) float each: `log_probs`, `advantages`, and what the settings read of
            `old_log_probs`, `rollout_log_probs`, `ref_log_probs` and `entropy`.
        mask: (N,) bool. Trainable tokens.
        offsets: (S+1,) int64. Where the tokens of each sample begin.
        micro_batches: (S,) int64. The micro-batch of each sample; None if all are one.
        cohorts: (S,) int64. The cohort or batch of each sample; None if all are one.
        widened: Gives inputs like these of whole batches, of which these are a part, and where the
            own tokens lie there; None where these are the whole batches.
    """

    columns: Mapping[str, Tensor]
    mask: Tensor
    offsets: Tensor
    micro_batches: Tensor | None = None
    cohorts: Tensor | None = None
    widened: Callable[[LossInputs], tuple[LossInputs, Tensor]] | None = None


@dataclass(frozen=True)
class Scored:
    """A policy loss and what it was made of.

    Args:
        terms: (N,) by scalar: pg_loss and, where there are such, ppo_kl and pg_clipfrac.
        ratio: (N,) The log ratio that was scored; None without one.
    """

    terms: dict[str, Tensor]
    ratio: Tensor | None = None


def scored_tokens(
    settings: LossSettings, given: LossInputs, weights: Tensor | None = None
) -> Scored:
    """Score every token by the surrogate in force, without what is added to it.

    Args:
        settings: The loss in force.
        given: Its inputs.
        weights: (N,) Train against rollout probabilities, for the surrogate that takes them in.
    """
    log_probs, advantages = given.columns["log_probs"], _advantages(settings, given)
    if settings.surrogate == "reinforce":
        return Scored({"pg_loss": policy_gradient_loss(log_probs, advantages)})
    ratio = _token_ratio(settings, given)
    absolute = settings.surrogate == "kl-cov" and settings.kl_cov_ppo_kl == "absolute"
    terms = {"ppo_kl": ratio.abs() if absolute else -ratio}
    if settings.ratio in _SEQUENCE_FORMS:
        ratio = sequence_log_ratio(
            ratio,
            given.mask,
            given.offsets,
            form=_SEQUENCE_FORMS[settings.ratio],
            epsilon=settings.count_epsilon,
            clamp=settings.sequence_log_ratio_clamp,
        )
    tokens = _Tokens(given, log_probs, ratio, advantages, weights)
    return Scored(terms | _SURROGATES[settings.surrogate](settings, tokens), ratio)


def undecided_penalties(settings: LossSettings, given: LossInputs) -> Undecided | None:
    """What tokens pay that rounding may pick, and how many of a micro-batch are picked.

    None of a surrogate that picks none. Arguments as of `scored_tokens`.
    """
    if settings.surrogate != "kl-cov":
        return None
    return kl_cov_undecided(
        given.columns["log_probs"],
        _token_ratio(settings, given),
        _advantages(settings, given),
        given.mask,
        given.offsets,
        fraction=settings.kl_cov_fraction,
        kl_coef=settings.kl_cov_coef,
        **_batches(given),
    )


def _advantages(settings: LossSettings, given: LossInputs) -> Tensor:
    advantages = given.columns["advantages"]
    if settings.advantage_level == "token":
        return advantages
    epsilon = settings.count_epsilon
    return sample_values(advantages, given.mask, given.offsets, epsilon=epsilon)


def _token_ratio(settings: LossSettings, given: LossInputs) -> Tensor:
    """(N,) The log ratio of each token."""
    log_probs = given.columns["log_probs"]
    if settings.ratio == "one":
        return log_ratio(log_probs, None)
    old = given.columns[LOG_PROB_SOURCES[settings.old_source]]
    return log_ratio(log_probs, old, clamp=settings.log_ratio_clamp)


@dataclass(frozen=True)
class _Tokens:
    given: LossInputs
    log_probs: Tensor
    ratio: Tensor
    advantages: Tensor
    weights: Tensor | None


def _ppo_clip(settings: LossSettings, tokens: _Tokens) -> dict[str, Tensor]:
    found = clip_loss(
        tokens.ratio,
        tokens.advantages,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        dual_clip=settings.dual_clip,
        dual_side=settings.dual_side,
    )
    return {"pg_loss": found.pg_loss, "pg_clipfrac": found.clipped}


def _cispo(settings: LossSettings, tokens: _Tokens) -> dict[str, Tensor]:
    found = cispo_loss(
        tokens.log_probs,
        tokens.ratio.detach(),  # a weight, which nothing is propagated back through
        tokens.advantages,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        bounds=settings.cispo_bounds,
    )
    return {"pg_loss": found.pg_loss, "pg_clipfrac": found.clipped}


def _sapo(settings: LossSettings, tokens: _Tokens) -> dict[str, Tensor]:
    taus = {"tau_pos": settings.sapo_tau_pos, "tau_neg": settings.sapo_tau_neg}
    found = sapo_loss(tokens.ratio, tokens.advantages, **taus)
    nothing = settings.sapo_clipped == "nothing"
    clipped = torch.zeros_like(found.gated) if nothing else found.gated
    return {"pg_loss": found.pg_loss, "pg_clipfrac": clipped}


def _dro(settings: LossSettings, tokens: _Tokens) -> dict[str, Tensor]:
    gain = policy_gradient_loss(tokens.log_probs, tokens.advantages)
    return {"pg_loss": gain + settings.dro_beta / 2.0 * tokens.ratio.square()}


def _dppo(settings: LossSettings, tokens: _Tokens) -> dict[str, Tensor]:
    other = tokens.given.columns[LOG_PROB_SOURCES[settings.old_source]]
    low, high = settings.eps_clip, settings.eps_clip_high
    high = low if high is None else high
    rule, measure = settings.dppo_rule, settings.dppo_measure
    columns = tokens.log_probs, other, tokens.advantages
    if settings.dppo_form == "ratio":
        found = dppo_loss(
            *columns,
            low=low,
            high=high,
            rule=rule,
            measure=measure,
            adv_tau=settings.dppo_adv_tau,
            kl_tau=settings.dppo_kl_tau,
        )
        return {"pg_loss": found.pg_loss, "pg_clipfrac": found.gated}
    gated = dppo_gate(*columns, low=low, high=high, rule=rule, measure=measure)
    cap = torch.inf if settings.dppo_ratio_cap is None else settings.dppo_ratio_cap
    weighted = cispo_loss(
        tokens.log_probs,
        tokens.ratio.detach(),
        settings.dppo_adv_tau * tokens.advantages,
        bounds="upper-absolute",
        eps_clip_high=cap,
    )
    loss = torch.where(gated, 0.0, weighted.pg_loss)
    return {"pg_loss": loss, "pg_clipfrac": gated.to(loss.dtype)}


def _gmpo(settings: LossSettings, tokens: _Tokens) -> dict[str, Tensor]:
    given = tokens.given
    sample = gmpo_loss(
        tokens.ratio,
        tokens.advantages,
        given.mask,
        given.offsets,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        epsilon=settings.count_epsilon,
    )
    # One value a sample, given to each of its tokens, is the mean over them.
    return {"pg_loss": spread(sample.pg_loss, given.offsets), "pg_clipfrac": sample.clipped}


def _vespo(settings: LossSettings, tokens: _Tokens) -> dict[str, Tensor]:
    found = vespo_loss(
        tokens.log_probs,
        tokens.ratio,
        tokens.advantages,
        tokens.given.mask,
        tokens.given.offsets,
        rollout_weights=tokens.weights,
        positive=(settings.vespo_k_pos, settings.vespo_lambda_pos),
        negative=(settings.vespo_k_neg, settings.vespo_lambda_neg),
    )
    return {"pg_loss": found.pg_loss}


def _kl_cov(settings: LossSettings, tokens: _Tokens) -> dict[str, Tensor]:
    found = kl_cov_loss(
        tokens.log_probs,
        tokens.ratio,
        tokens.advantages,
        tokens.given.mask,
        tokens.given.offsets,
        fraction=settings.kl_cov_fraction,
        kl_coef=settings.kl_cov_coef,
        **_batches(tokens.given),
    )
    return {"pg_loss": found.pg_loss}


def _m2po(settings: LossSettings, tokens: _Tokens) -> dict[str, Tensor]:
    mask = tokens.given.mask
    found = m2po_loss(
        tokens.ratio,
        tokens.advantages,
        torch.ones_like(mask) if settings.m2po_counts == "response" else mask,
        tokens.given.offsets,
        budget=settings.m2po_kl2_budget,
        least_low=settings.m2po_least_low,
        least_high=settings.m2po_least_high,
        **_batches(tokens.given),
    )
    return {"pg_loss": found.pg_loss, "pg_clipfrac": found.clipped}


def _batches(given: LossInputs) -> dict[str, Any]:
    """What kernels that decide by micro-batch are told of them."""
    return {"index": given.micro_batches, "size": number_of_sets(given.micro_batches)}


_SURROGATES: dict[str, Callable[[LossSettings, _Tokens], dict[str, Tensor]]] = {
    "ppo-clip": _ppo_clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "dro": _dro,
    "dppo": _dppo,
    "gmpo": _gmpo,
    "vespo": _vespo,
    "kl-cov": _kl_cov,
    "m2po": _m2po,
}

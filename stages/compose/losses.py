"""The terms of policy and value loss at each token, as their settings say."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trajreplay.schema import LossSettings, ValueSettings
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.kernels.clipping import cispo_loss, clip_loss, policy_gradient_loss
from trajreplay.stages.kernels.correction import bound_weights, importance_weights
from trajreplay.stages.kernels.gates import dppo_loss, kl_cov_loss, sapo_loss
from trajreplay.stages.kernels.kl_loss import weighted_kl
from trajreplay.stages.kernels.m2po import m2po_loss
from trajreplay.stages.kernels.masked import spread
from trajreplay.stages.kernels.off_policy import off_policy_keep
from trajreplay.stages.kernels.ratio import log_ratio, sequence_log_ratio
from trajreplay.stages.kernels.sample_losses import gmpo_loss, vespo_loss
from trajreplay.stages.kernels.value import value_loss


def policy_terms(
    settings: LossSettings,
    columns: Mapping[str, Tensor],
    mask: Tensor,
    offsets: Tensor,
    micro_batches: Tensor | None = None,
) -> dict[str, Tensor]:
    """What is summed up into the recorded scalars, a value a token.

    Args:
        settings: The loss in force.
        columns: (N,) float each: `log_probs`, `advantages`, and what the settings read of
            `old_log_probs`, `rollout_log_probs`, `ref_log_probs` and `entropy`.
        mask: (N,) bool. Trainable tokens.
        offsets: (S+1,) int64. Where the tokens of each sample begin.
        micro_batches: (S,) int64. The micro-batch of each sample, for surrogates that act on one.

    Returns:
        By scalar, (N,) in the dtype of the columns; `ppo_kl` and `pg_clipfrac` only where there is
        a ratio, `kl_loss` and `entropy_loss` where they are read.
    """
    log_probs, advantages = columns["log_probs"], columns["advantages"]
    terms: dict[str, Tensor] = {}
    if settings.surrogate == "reinforce":
        terms["pg_loss"] = policy_gradient_loss(log_probs, advantages)
    else:
        old = None if settings.ratio == "one" else columns[LOG_PROB_SOURCES[settings.old_source]]
        ratio = log_ratio(log_probs, old, clamp=settings.log_ratio_clamp)
        terms["ppo_kl"] = -ratio
        if settings.ratio in _SEQUENCE_FORMS:
            form = _SEQUENCE_FORMS[settings.ratio]
            ratio = sequence_log_ratio(ratio, mask, offsets, form=form)
        if settings.surrogate in ("gmpo", "vespo"):
            terms |= _sample_surrogate(settings, columns, ratio, mask, offsets)
        elif settings.surrogate in ("m2po", "kl-cov"):
            terms |= _batch_surrogate(settings, columns, ratio, mask, offsets, micro_batches)
        else:
            terms |= _surrogate(settings, columns, ratio)
    if settings.opsm_delta is not None:
        drift = log_ratio(log_probs, columns["old_log_probs"])
        kept = off_policy_keep(drift, advantages, mask, offsets, threshold=settings.opsm_delta)
        terms["pg_loss"] = torch.where(kept.keep, terms["pg_loss"], 0.0)
    if settings.correction != "none":
        terms["pg_loss"] = terms["pg_loss"] * _weights(settings, columns, mask, offsets)
    if settings.kl_loss_coef:
        terms["kl_loss"] = _kl_loss(settings, columns)
    if "entropy" in columns:
        terms["entropy_loss"] = columns["entropy"]
    return terms


_SEQUENCE_FORMS = {"sequence-mean": "mean", "sequence-sum": "sum"}


def _surrogate(
    settings: LossSettings, columns: Mapping[str, Tensor], ratio: Tensor
) -> dict[str, Tensor]:
    log_probs, advantages = columns["log_probs"], columns["advantages"]
    low, high = settings.eps_clip, settings.eps_clip_high
    if settings.surrogate == "cispo":
        found = cispo_loss(
            log_probs,
            ratio,
            advantages,
            eps_clip=low,
            eps_clip_high=high,
            bounds=settings.cispo_bounds,
        )
        return {"pg_loss": found.pg_loss, "pg_clipfrac": found.clipped}
    if settings.surrogate == "sapo":
        taus = {"tau_pos": settings.sapo_tau_pos, "tau_neg": settings.sapo_tau_neg}
        gated = sapo_loss(ratio, advantages, **taus)
        return {"pg_loss": gated.pg_loss, "pg_clipfrac": gated.gated}
    if settings.surrogate == "dppo":
        gated = dppo_loss(
            log_probs,
            columns[LOG_PROB_SOURCES[settings.old_source]],
            advantages,
            low=low,
            high=low if high is None else high,
            kl_tau=settings.dppo_kl_tau,
        )
        return {"pg_loss": gated.pg_loss, "pg_clipfrac": gated.gated}
    clipped = clip_loss(
        ratio, advantages, eps_clip=low, eps_clip_high=high, dual_clip=settings.dual_clip
    )
    return {"pg_loss": clipped.pg_loss, "pg_clipfrac": clipped.clipped}


def _sample_surrogate(
    settings: LossSettings,
    columns: Mapping[str, Tensor],
    ratio: Tensor,
    mask: Tensor,
    offsets: Tensor,
) -> dict[str, Tensor]:
    """Surrogates that look at all tokens of a sample."""
    if settings.surrogate == "vespo":
        found = vespo_loss(columns["log_probs"], ratio, columns["advantages"], mask, offsets)
        return {"pg_loss": found.pg_loss}
    sample = gmpo_loss(
        ratio,
        columns["advantages"],
        mask,
        offsets,
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
    )
    # One value a sample, given to each of its tokens, is the mean over them.
    return {"pg_loss": spread(sample.pg_loss, offsets), "pg_clipfrac": sample.clipped}


def _batch_surrogate(
    settings: LossSettings,
    columns: Mapping[str, Tensor],
    ratio: Tensor,
    mask: Tensor,
    offsets: Tensor,
    micro_batches: Tensor | None,
) -> dict[str, Tensor]:
    """Surrogates that look at all tokens of a micro-batch."""
    size = 1 if micro_batches is None or not len(micro_batches) else int(micro_batches.max()) + 1
    advantages = columns["advantages"]
    if settings.surrogate == "kl-cov":
        gated = kl_cov_loss(
            columns["log_probs"],
            ratio,
            advantages,
            mask,
            offsets,
            fraction=settings.kl_cov_fraction,
            kl_coef=settings.kl_cov_coef,
            index=micro_batches,
            size=size,
        )
        return {"pg_loss": gated.pg_loss}
    budget = settings.m2po_kl2_budget
    found = m2po_loss(
        ratio, advantages, mask, offsets, budget=budget, index=micro_batches, size=size
    )
    return {"pg_loss": found.pg_loss, "pg_clipfrac": found.clipped}


# Of each correction, whose weight it is, and what happens outside its bounds.
_CORRECTIONS = {
    "tis": ("token", "truncate"),
    "icepop": ("token", "zero"),
    "sequence-tis": ("sequence", "truncate"),
    "sequence-mask": ("sequence", "zero"),
    "geometric-mask": ("token", "zero"),
}


def _weights(
    settings: LossSettings, columns: Mapping[str, Tensor], mask: Tensor, offsets: Tensor
) -> Tensor:
    """The weight of train against rollout probabilities."""
    assert settings.correction_bounds is not None  # the capability matrix asks for them
    low, high = settings.correction_bounds
    level, action = _CORRECTIONS[settings.correction]
    gap = log_ratio(columns["old_log_probs"], columns["rollout_log_probs"])
    weights = importance_weights(gap, mask, offsets, level=level)
    criterion = None
    if settings.correction == "geometric-mask":
        criterion = importance_weights(gap, mask, offsets, level="geometric")
    return bound_weights(weights, low=low, high=high, action=action, criterion=criterion).weight


def _kl_loss(settings: LossSettings, columns: Mapping[str, Tensor]) -> Tensor:
    weights = None
    if settings.kl_loss_weighted:
        weights = log_ratio(columns["log_probs"], columns["old_log_probs"]).exp()
    estimator = settings.kl_loss_estimator
    return weighted_kl(
        columns["log_probs"],
        columns["ref_log_probs"],
        estimator="k3" if estimator == "low_var_kl" else estimator,
        weights=weights,
        value_clamp=settings.kl_loss_clamp,
        log_ratio_clamp=settings.kl_loss_log_ratio_clamp,
    )


def value_terms(settings: ValueSettings, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is summed up into the recorded scalars of the value loss, a value a token.

    Args:
        settings: The value loss in force.
        columns: (N,) float each: `values`, `returns`, and `old_values` where there is a clip.

    Returns:
        By scalar, (N,) in the dtype of the columns.
    """
    found = value_loss(
        columns["values"],
        columns["returns"],
        columns.get("old_values"),
        value_clip=settings.clip,
        factor=settings.factor,
        huber_delta=settings.huber_delta,
        counted=settings.counted,
    )
    return {"value_loss": found.value_loss, "value_clipfrac": found.clipped}

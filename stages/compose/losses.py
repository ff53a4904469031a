"""The terms of policy and value loss at each token, as their settings say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.schema import LossSettings, Settings, ValueSettings
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.compose.corrections import kept_tokens, rollout_weights
from trajreplay.stages.compose.surrogates import LossInputs, scored_tokens, undecided_penalties
from trajreplay.stages.kernels.correction import importance_weights
from trajreplay.stages.kernels.gates import Undecided
from trajreplay.stages.kernels.kl_loss import weighted_kl
from trajreplay.stages.kernels.off_policy import off_policy_keep
from trajreplay.stages.kernels.ratio import log_ratio
from trajreplay.stages.kernels.value import value_loss


class PolicyTerms(NamedTuple):
    """What is summed up into the recorded scalars, and over which tokens.

    Args:
        terms: (N,) by scalar, in the dtype of the columns; `ppo_kl` and `pg_clipfrac` only where
            there is a ratio, `kl_loss` and `entropy_loss` where they are read.
        summed: (N,) bool. The tokens that enter the sums.
        counted: (N,) bool. The tokens that a mean divides by.
    """

    terms: dict[str, Tensor]
    summed: Tensor
    counted: Tensor


def policy_terms(settings: LossSettings, given: LossInputs) -> PolicyTerms:
    """The terms of a policy loss, a value a token.

    Args:
        settings: The loss in force.
        given: Its inputs.
    """
    columns, weights = given.columns, rollout_weights(settings, given)
    given, summed = _remaining(settings, given)
    scored = scored_tokens(settings, given, weights)
    terms = dict(scored.terms)
    if settings.opsm_delta is not None:
        drift = log_ratio(columns["log_probs"], columns[LOG_PROB_SOURCES[settings.opsm_source]])
        keep = off_policy_keep(
            drift,
            columns["advantages"],
            given.mask,
            given.offsets,
            threshold=settings.opsm_delta,
        ).keep
        terms["pg_loss"] = torch.where(keep, terms["pg_loss"], 0.0)
    if weights is not None and settings.surrogate != "vespo":
        terms["pg_loss"] = terms["pg_loss"] * weights
    if settings.kl_loss_coef:
        terms["kl_loss"] = _kl_loss(settings, given, scored.ratio)
    if "entropy" in columns:
        terms["entropy_loss"] = columns["entropy"]
    return PolicyTerms(terms, summed, given.mask)


def _remaining(settings: LossSettings, given: LossInputs) -> tuple[LossInputs, Tensor]:
    """The inputs, their mask that of what is counted, and the tokens that are summed."""
    kept = kept_tokens(settings, given)
    summed = given.mask if kept is None else kept
    by_kept = settings.rejection_denominator == "kept"
    return (replace(given, mask=summed) if by_kept else given), summed


def undecided_terms(settings: LossSettings, given: LossInputs) -> Undecided | None:
    """What rounding alone decides of pg_loss at each token, and of how many in a micro-batch.

    None of a loss that leaves nothing to it. Arguments as of `policy_terms`.
    """
    counted, summed = _remaining(settings, given)
    found = undecided_penalties(settings, counted)
    if found is None:
        return None
    weights = rollout_weights(settings, given)
    weighted = found.penalty if weights is None else found.penalty * weights.abs()
    return found._replace(penalty=torch.where(summed, weighted, 0.0))


def _kl_loss(settings: LossSettings, given: LossInputs, ratio: Tensor | None) -> Tensor:
    columns, weights = given.columns, None
    if settings.kl_loss_weighted and settings.kl_loss_weight == "ratio":
        assert ratio is not None  # the capability matrix asks for a ratio
        weights = ratio.exp()
    elif settings.kl_loss_weighted:
        other = columns[LOG_PROB_SOURCES[settings.kl_loss_weight]]
        weights = importance_weights(
            log_ratio(columns["log_probs"], other),
            given.mask,
            given.offsets,
            undefined=settings.undefined_weight if settings.kl_loss_weight == "rollout" else None,
        )
    estimator = settings.kl_loss_estimator
    value_clamp, log_ratio_clamp = settings.kl_loss_bounds
    return weighted_kl(
        columns["log_probs"],
        columns["ref_log_probs"],
        estimator="k3" if estimator == "low_var_kl" else estimator,
        weights=weights,
        value_clamp=value_clamp,
        log_ratio_clamp=log_ratio_clamp,
    )


def value_tokens(settings: Settings, given: LossInputs) -> Tensor:
    """(N,) bool. The tokens that a value loss is of.

    Args:
        settings: The arithmetic in force.
        given: The inputs of its policy loss, where that decides which are kept.
    """
    if settings.value.counts == "response":
        return torch.ones_like(given.mask)
    kept = kept_tokens(settings.loss, given) if settings.value.counts == "kept" else None
    return given.mask if kept is None else kept


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

"""How a loss corrects for the sampler: weights of train against rollout, and what drops out."""

from __future__ import annotations

from math import isfinite

from torch import Tensor

from trajreplay.schema import LossSettings
from trajreplay.schema.settings.knobs import Interval
from trajreplay.stages.compose.surrogates import LossInputs
from trajreplay.stages.kernels.correction import (
    bound_weights,
    importance_weights,
    normalised_weights,
)
from trajreplay.stages.kernels.m2po import m2po_keep
from trajreplay.stages.kernels.ratio import log_ratio
from trajreplay.stages.kernels.rejection import DivergenceKeep, divergence_keep, veto
from trajreplay.stages.kernels.sets import number_of_sets

# Of each correction: whose weight it is, what happens outside its bounds, what they bound.
_CORRECTIONS = {
    "tis": ("token", "truncate", None),
    "icepop": ("token", "zero", None),
    "sequence-tis": ("sequence", "truncate", None),
    "sequence-mask": ("sequence", "zero", None),
    "geometric-tis": ("geometric", "truncate", None),
    "geometric-icepop": ("geometric", "zero", None),
    "geometric-mask": ("token", "zero", "geometric"),
}


def rollout_weights(settings: LossSettings, given: LossInputs) -> Tensor | None:
    """(N,) The weight of train against rollout probabilities; None where there is none."""
    if settings.correction == "none":
        return None
    assert settings.correction_bounds is not None  # the capability matrix asks for them
    by_batch = settings.correction_norm_over == "micro-batch"
    if settings.correction_norm != "none" and not by_batch and given.widened is not None:
        whole, places = given.widened(given)
        found = rollout_weights(settings, whole)
        return None if found is None else found[places]
    low, high = settings.correction_bounds
    level, action, judged = _CORRECTIONS[settings.correction]
    weights = _weights(settings, given, level)
    criterion = None if judged is None else _weights(settings, given, judged)
    if settings.correction_criterion != "weight":
        criterion = _judged(given, settings, settings.correction_criterion, (low, high)).criterion
    bounded = bound_weights(weights, low=low, high=high, action=action, criterion=criterion).weight
    if settings.correction_norm == "none":
        return bounded
    sets = given.micro_batches if by_batch else given.cohorts
    return normalised_weights(
        bounded,
        given.mask,
        given.offsets,
        level=settings.correction_norm,
        index=sets,
        size=number_of_sets(sets),
    )


def _weights(settings: LossSettings, given: LossInputs, level: str) -> Tensor:
    return importance_weights(
        _gap(given),
        given.mask,
        given.offsets,
        level=level,
        clamp=settings.correction_log_clamp,
        epsilon=settings.count_epsilon,
        undefined=settings.undefined_weight,
    )


def _gap(given: LossInputs) -> Tensor:
    return log_ratio(given.columns["old_log_probs"], given.columns["rollout_log_probs"])


def _judged(
    given: LossInputs,
    settings: LossSettings,
    name: str,
    bounds: Interval,
    *,
    reverse: bool = False,
    clamp: Interval | None = None,
) -> DivergenceKeep:
    """What tokens are judged by under one of the names of `rejection`, and which are inside."""
    level, _, metric = name.partition("-")
    low, high = (one if isfinite(one) else None for one in bounds)
    return divergence_keep(
        _gap(given),
        given.mask,
        given.offsets,
        metric=metric,
        statistic=level,
        low=low,
        high=high,
        reverse=reverse,
        log_ratio_clamp=clamp,
        epsilon=settings.count_epsilon,
    )


def kept_tokens(settings: LossSettings, given: LossInputs) -> Tensor | None:
    """The trained tokens that the loss does not reject.

    Args:
        settings: The loss in force.
        given: Its inputs.

    Returns:
        (N,) bool, false where masked; None where the loss rejects nothing.
    """
    keeps: list[Tensor] = []
    for name, bounds in settings.rejection.items():
        reverse, clamp = settings.rejection_reverse, settings.rejection_log_clamp
        keeps.append(_judged(given, settings, name, bounds, reverse=reverse, clamp=clamp).keep)
    if settings.veto is not None:
        keeps.append(veto(_gap(given), given.mask, given.offsets, threshold=settings.veto))
    if settings.m2_threshold is not None:
        keeps.append(
            m2po_keep(
                _gap(given),
                given.mask,
                given.offsets,
                threshold=settings.m2_threshold,
                index=given.micro_batches,
                size=number_of_sets(given.micro_batches),
            )
        )
    if not keeps:
        return None
    kept = given.mask
    for one in keeps:
        kept = kept & one
    return kept

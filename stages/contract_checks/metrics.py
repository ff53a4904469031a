"""Metrics that trainings log beside their loss: each recomputed from the tokens of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.contract_checks.columns import Floats, Found, Ints, Together
from trajreplay.stages.outputs import Recorded, is_stated, recorded_outputs

# Metrics are logged in float32, and some from log-probs of half precision.
NEAR = 1e-3
_FAR = 60.0  # beyond it an exponential is no ratio any more
_SCOPES = ("micro_batch", "rank", "global")
Held = Mapping[str, Floats]  # the columns at some tokens


def _always(settings: Settings) -> bool:
    return True


@dataclass(frozen=True)
class Metric:
    """A logged number by one definition.

    Args:
        doc: What it is over the trained tokens.
        needs: Columns.
        tokens: The value of each token.
        total: mean, largest or smallest.
        defined: Whether settings say everything that it depends on.
    """

    doc: str
    needs: tuple[str, ...]
    tokens: Callable[[Settings, Held], Floats]
    total: str = "mean"
    defined: Callable[[Settings], bool] = _always

    def reads(self, settings: Settings) -> tuple[str, ...]:
        """The columns that it is made of; the denominator of the ratio is a setting."""
        if self.needs[:2] == _NOW and settings.loss.old_source == "rollout":
            return ("log_probs", "rollout_log_probs", *self.needs[2:])
        return self.needs

    def of(self, settings: Settings, held: Held, owner: Ints) -> tuple[float, ...]:
        """What it may be over some tokens.

        Args:
            settings: The arithmetic in force.
            held: (N,) The columns that it needs, at these tokens, by the names it has for them.
            owner: (N,) The sample of each.

        Returns:
            A mean may be of the tokens, or of the means of the samples: trainings reduce what they
            log as they reduce their loss, or plainly.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.tokens(settings, held)
            if self.total != "mean":
                return (float(values.max() if self.total == "largest" else values.min()),)
            counts = np.bincount(owner)
            sums = np.bincount(owner, values)
            by_sample = sums[counts > 0] / counts[counts > 0]
            return float(values.mean()), float(by_sample.mean())


def _ratio(settings: Settings, held: Held) -> Floats:
    low, high = settings.loss.log_ratio_clamp or (-_FAR, _FAR)
    return np.exp(np.clip(held["log_probs"] - held["old_log_probs"], low, high))


def _weight(settings: Settings, held: Held) -> Floats:
    return np.exp(np.clip(held["old_log_probs"] - held["rollout_log_probs"], -_FAR, _FAR))


def _bounded(settings: Settings, held: Held) -> Floats:
    assert settings.loss.correction_bounds is not None
    return np.clip(_weight(settings, held), *settings.loss.correction_bounds)


def _truncated(settings: Settings, held: Held) -> Floats:
    assert settings.loss.correction_bounds is not None
    low, high = settings.loss.correction_bounds
    weight = _weight(settings, held)
    return ((weight < low) | (weight > high)).astype(np.float64)


def _held_by_dual_clip(settings: Settings, held: Held) -> Floats:
    """The plain loss exceeds the dual clip, which acts where the advantage is negative."""
    assert settings.loss.dual_clip is not None
    binds = (held["advantages"] < 0) & (_ratio(settings, held) > settings.loss.dual_clip)
    return binds.astype(np.float64)


def _k3(settings: Settings, held: Held) -> Floats:
    gap = held["old_log_probs"] - held["log_probs"]
    return np.expm1(np.clip(gap, -_FAR, _FAR)) - gap


def _sampler_k3(settings: Settings, held: Held) -> Floats:
    gap = held["old_log_probs"] - held["rollout_log_probs"]
    return np.expm1(np.clip(gap, -_FAR, _FAR)) - gap


def _by_token(settings: Settings) -> bool:
    """Whether the ratio of the loss is that of a token, against a column that is recorded."""
    return settings.loss.ratio == "token" and settings.loss.proximal == "recorded"


def _dual_clipped(settings: Settings) -> bool:
    loss = settings.loss
    return _by_token(settings) and loss.dual_clip is not None and loss.dual_side == "negative"


def _has_bounds(settings: Settings) -> bool:
    """Whether weights of tokens have bounds; those of samples, or of a criterion, are others."""
    loss = settings.loss
    by_token = (
        loss.correction in ("none", "tis", "icepop") and loss.correction_criterion == "weight"
    )
    return loss.correction_bounds is not None and by_token


_NOW, _THEN = ("log_probs", "old_log_probs"), ("old_log_probs", "rollout_log_probs")
METRICS: Mapping[str, Metric] = {
    "ratio_mean": Metric("mean ratio of current to old", _NOW, _ratio, defined=_by_token),
    "ratio_max": Metric("largest ratio of current to old", _NOW, _ratio, "largest", _by_token),
    "ratio_min": Metric("smallest ratio of current to old", _NOW, _ratio, "smallest", _by_token),
    "approx_kl": Metric("mean k3 of current against old", _NOW, _k3, defined=_by_token),
    "pg_clipfrac_lower": Metric(
        "share of tokens that the dual clip holds",
        (*_NOW, "advantages"),
        _held_by_dual_clip,
        defined=_dual_clipped,
    ),
    "sampler_ratio_mean": Metric("mean ratio of old to rollout, not truncated", _THEN, _weight),
    "sampler_ratio_max": Metric("largest ratio of old to rollout", _THEN, _weight, "largest"),
    "sampler_ratio_min": Metric("smallest ratio of old to rollout", _THEN, _weight, "smallest"),
    "sampler_ratio_bounded": Metric(
        "mean of that ratio within its bounds", _THEN, _bounded, defined=_has_bounds
    ),
    "sampler_ratio_truncated": Metric(
        "share of tokens beyond these bounds", _THEN, _truncated, defined=_has_bounds
    ),
    "sampler_kl": Metric("mean k3 of old against rollout", _THEN, _sampler_k3),
}


def audited(block: Block, one: Recorded) -> Metric | None:
    """The definition by which a recorded scalar is judged.

    Args:
        block: The cohorts.
        one: The scalar.

    Returns:
        None where nothing is known of such a scalar, the settings leave open what it is, or a
        column or a sample is not there.
    """
    output, metric = one.output, METRICS.get(one.output.field)
    stated = output.value is not None and output.reduction == "mean" and is_stated(output)
    if metric is None or not stated or output.scope not in _SCOPES or not one.complete:
        return None
    there = block.packed.table.column_names
    if not metric.defined(block.settings) or not {*metric.reads(block.settings)} <= {*there}:
        return None
    return metric


def check_metrics(given: Together) -> Iterator[Found]:
    """Logged metrics that their definition does not give."""
    for index, cohort in enumerate(given.block.cohorts):
        logged = (one for entry in cohort.owners for one in entry.outputs if one.field in METRICS)
        for stage in sorted({one.stage for one in logged}):
            for one in recorded_outputs(given.block, index, stage):
                metric = audited(given.block, one)
                if metric is not None:
                    yield from _judged(given, index, one, metric)


def _judged(given: Together, index: int, one: Recorded, metric: Metric) -> Iterator[Found]:
    settings, output = given.settings, one.output
    assert output.value is not None
    samples: Ints = one.samples.numpy()
    lengths = given.lengths[samples]
    owner = np.arange(len(samples)).repeat(lengths)
    first = given.offsets[:-1][samples] - np.concatenate([[0], np.cumsum(lengths)])[:-1]
    tokens = np.arange(len(owner)) + first[owner]
    trained = given.mask[tokens]
    if not trained.any():
        return  # what is taken over nothing is a matter of taste
    held = {
        name: given.tokens(column)[tokens].astype(np.float64)
        for name, column in zip(metric.needs, metric.reads(settings), strict=True)
    }
    counted = {name: values[trained] for name, values in held.items()}
    recorded = output.value / output.scale
    right = metric.of(settings, counted, owner[trained])
    if _near(recorded, right):
        return
    bounded = METRICS["sampler_ratio_bounded"]
    others = {f"over masked tokens too ({metric.doc})": metric.of(settings, held, owner)}
    if metric.needs == _THEN and bounded.defined(settings):
        truncated = bounded.of(settings, counted, owner[trained])
        others["of ratios after they were truncated"] = truncated
    known = next((what for what, values in others.items() if _near(recorded, values)), "")
    place = f"rank {one.entry.key.rank}"
    if output.micro_batch_id is not None:
        place += f" micro-batch {output.micro_batch_id}"
    message = (
        f"{output.field} of {place} is {recorded:.6g}, and the {metric.doc} is {right[0]:.6g}"
        f"{f': it was taken {known}' if known else ''}"
    )
    check = "metric.disagrees"
    yield index, given.of(index).finding(check, "warning", message, stage=output.stage)


def _near(recorded: float, values: tuple[float, ...]) -> bool:
    """Whether a recorded number is one of some; a NaN is a NaN."""
    if np.isnan(recorded):
        return bool(np.isnan(values).any())
    return any(
        recorded == value or abs(recorded - value) <= NEAR * max(abs(value), NEAR)
        for value in values
    )

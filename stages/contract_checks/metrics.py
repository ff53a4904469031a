"""Metrics that trainings log beside their loss: each recomputed from the tokens of its samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trajreplay.schema.entry import Output
from trajreplay.schema.settings import Settings
from trajreplay.stages.cohort import LoadedCohort
from trajreplay.stages.contract_checks.columns import Columns, Flags, Floats, Found, Together
from trajreplay.stages.report import Finding

# Metrics are logged in float32, and some from log-probs of half precision.
NEAR = 1e-3
_FAR = 60.0  # beyond it an exponential is no ratio any more


@dataclass(frozen=True)
class Metric:
    """A logged number by one definition.

    Args:
        doc: What it is over the trained tokens.
        needs: Columns.
        tokens: The value of each token.
        total: mean, largest or smallest.
    """

    doc: str
    needs: tuple[str, ...]
    tokens: Callable[[Settings, Mapping[str, Floats]], Floats]
    total: str = "mean"

    def of(self, settings: Settings, held: Mapping[str, Floats], mask: Flags) -> float:
        """The metric over some tokens."""
        with np.errstate(over="ignore"):
            values = self.tokens(settings, held)[mask]
        if not len(values):
            return 0.0
        if self.total == "mean":
            return float(values.mean())
        return float(values.max() if self.total == "largest" else values.min())


def _ratio(settings: Settings, held: Mapping[str, Floats]) -> Floats:
    return np.exp(np.clip(held["log_probs"] - held["old_log_probs"], -_FAR, _FAR))


def _weight(settings: Settings, held: Mapping[str, Floats]) -> Floats:
    return np.exp(np.clip(held["old_log_probs"] - held["rollout_log_probs"], -_FAR, _FAR))


def _bounded(settings: Settings, held: Mapping[str, Floats]) -> Floats:
    low, high = settings.loss.correction_bounds or (0.0, 2.0)
    return np.clip(_weight(settings, held), low, high)


def _truncated(settings: Settings, held: Mapping[str, Floats]) -> Floats:
    low, high = settings.loss.correction_bounds or (0.0, 2.0)
    weight = _weight(settings, held)
    return ((weight < low) | (weight > high)).astype(np.float64)


def _held_by_dual_clip(settings: Settings, held: Mapping[str, Floats]) -> Floats:
    """The plain loss exceeds the dual clip, which acts where the advantage is negative."""
    bound = 3.0 if settings.loss.dual_clip is None else settings.loss.dual_clip
    binds = (held["advantages"] < 0) & (_ratio(settings, held) > bound)
    return binds.astype(np.float64)


def _k3(settings: Settings, held: Mapping[str, Floats]) -> Floats:
    gap = held["old_log_probs"] - held["log_probs"]
    return np.expm1(np.clip(gap, -_FAR, _FAR)) - gap


def _sampler_k3(settings: Settings, held: Mapping[str, Floats]) -> Floats:
    gap = held["old_log_probs"] - held["rollout_log_probs"]
    return np.expm1(np.clip(gap, -_FAR, _FAR)) - gap


_NOW, _THEN = ("log_probs", "old_log_probs"), ("old_log_probs", "rollout_log_probs")
METRICS: Mapping[str, Metric] = {
    "ratio_mean": Metric("mean ratio of current to old", _NOW, _ratio),
    "ratio_max": Metric("largest ratio of current to old", _NOW, _ratio, "largest"),
    "ratio_min": Metric("smallest ratio of current to old", _NOW, _ratio, "smallest"),
    "approx_kl": Metric("mean k3 of current against old", _NOW, _k3),
    "pg_clipfrac_lower": Metric(
        "share of tokens that the dual clip holds", (*_NOW, "advantages"), _held_by_dual_clip
    ),
    "sampler_ratio_mean": Metric("mean ratio of old to rollout, not truncated", _THEN, _weight),
    "sampler_ratio_max": Metric("largest ratio of old to rollout", _THEN, _weight, "largest"),
    "sampler_ratio_min": Metric("smallest ratio of old to rollout", _THEN, _weight, "smallest"),
    "sampler_ratio_bounded": Metric("mean of that ratio within its bounds", _THEN, _bounded),
    "sampler_ratio_truncated": Metric("share of tokens beyond these bounds", _THEN, _truncated),
    "sampler_kl": Metric("mean k3 of old against rollout", _THEN, _sampler_k3),
}


def check_metrics(given: Together) -> Iterator[Found]:
    """Logged metrics that their definition does not give."""
    for index, cohort in enumerate(given.block.cohorts):
        if any(one.field in METRICS for entry in cohort.owners for one in entry.outputs):
            yield from ((index, found) for found in _metrics(given.of(index), cohort))


def _metrics(given: Columns, cohort: LoadedCohort) -> Iterator[Finding]:
    """Of a rank or of all; what is there in part has another value than was logged."""
    whole = cohort.whole and not cohort.report.partial
    for entry in given.entries:
        here = given.ranks == entry.key.rank
        if not whole and int(here.sum()) != entry.rows:
            continue
        mine = given.mask & here.repeat(given.lengths)
        for one in entry.outputs:
            metric = METRICS.get(one.field)
            if metric is None or one.value is None or not given.has(*metric.needs):
                continue
            scopes = {"rank": mine, **({"global": given.mask} if whole else {})}
            scope = scopes.get(one.scope or "")
            if scope is not None and one.reduction == "mean":
                yield from _judged(given, entry.key.rank, one, metric, scope)


def _judged(
    given: Columns, rank: int, one: Output, metric: Metric, scope: Flags
) -> Iterator[Finding]:
    assert one.value is not None
    held = {name: given.tokens(name).astype(np.float64) for name in metric.needs}
    recorded = one.value / one.scale
    if _near(recorded, metric.of(given.settings, held, scope)):
        return
    right = metric.of(given.settings, held, scope)
    others = {
        f"over masked tokens too ({metric.doc})": metric.of(
            given.settings, held, np.ones_like(scope)
        ),
        "of ratios after they were truncated": METRICS["sampler_ratio_bounded"].of(
            given.settings, held, scope
        )
        if metric.needs == _THEN
        else np.nan,
    }
    known = next((what for what, value in others.items() if _near(recorded, value)), "")
    message = (
        f"{one.field} of rank {rank} is {recorded:.6g}, and the {metric.doc} is {right:.6g}"
        f"{f': it was taken {known}' if known else ''}"
    )
    yield given.finding("metric.disagrees", "warning", message, stage=one.stage)


def _near(recorded: float, value: float) -> bool:
    return abs(recorded - value) <= NEAR * max(abs(value), NEAR)

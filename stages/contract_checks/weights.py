"""Checks of weight versions: mixed within a sample, going back, never counted, too old."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trajreplay.schema.columns import has_column
from trajreplay.schema.settings import Settings
from trajreplay.stages.contract_checks.columns import Columns, Found, Ints, Together
from trajreplay.stages.report import Finding

# Columns that the weights of a training computed, the latest first.
_TRAINED = ("log_probs", "old_log_probs")


def check_weights(given: Together) -> Iterator[Found]:
    """Everything about the weights that sampled a response."""
    if _stated(given.block.settings) or has_column(given.packed.table, "weight_versions"):
        yield from given.each(_weights)


def _stated(settings: Settings) -> list[str]:
    """What the settings demand of weight versions."""
    sampling = settings.sampling
    demanded = {
        "max_staleness": sampling.max_staleness is not None,
        "partial": sampling.partial is False,
    }
    return [f"sampling.{name}" for name, on in demanded.items() if on]


def _unchecked(given: Columns, demanded: list[str], why: str) -> Finding:
    message = f"{' and '.join(demanded)} stated and not checked: {why}"
    return given.finding("weights.unchecked", "warning", message)


def _weights(given: Columns) -> Iterator[Finding]:
    if not given.has("weight_versions"):
        if (demanded := _stated(given.settings)) and given.table.num_rows:
            why = "the weight versions of some samples were not recorded"
            yield _unchecked(given, demanded, why)
        return
    versions, owner = given.spans.version, given.spans.owner
    if not len(versions):
        return
    yield from _steps(given, versions, owner)
    yield from _staleness(given, versions, owner)
    if given.rollout_id >= 2 and not versions.any() and given.table.num_rows > 1:
        message = (
            f"every weight version is 0 at rollout {given.rollout_id}: versions that are never "
            "counted say nothing of staleness"
        )
        yield given.finding("weights.never-counted", "warning", message)


def _steps(given: Columns, versions: Ints, owner: Ints) -> Iterator[Finding]:
    """From one span of a response to the next: other weights, or older ones."""
    same = owner[1:] == owner[:-1]
    step = np.diff(versions)
    mixed, back = np.unique(owner[1:][same & (step != 0)]), owner[1:][same & (step < 0)]
    if len(back):
        row = int(back[0])
        message = f"{len(back)} spans were sampled by older weights than the span before them"
        yield given.finding("weights.backwards", "warning", message, sample=row)
    partial = given.settings.sampling.partial
    if not len(mixed) or partial:
        return
    row = int(mixed[0])
    found = ", ".join(map(str, versions[owner == row].tolist()[:4]))
    message = f"{len(mixed)} samples were sampled by several weight versions, here {found}: "
    if partial is None:
        message += "legal only with partial rollouts; state sampling.partial"
        yield given.finding("weights.mixed", "warning", message, sample=row)
        return
    message += "the settings say that no rollout is partial"
    yield given.finding("weights.mixed", "error", message, sample=row)


def _staleness(given: Columns, versions: Ints, owner: Ints) -> Iterator[Finding]:
    """Versions between the weights that sampled a span and those that train on it."""
    name = next((one for one in _TRAINED if given.version_of(one) is not None), None)
    if name is None:
        trains = any(has_column(given.table, one) for one in _TRAINED)
        if trains and given.settings.sampling.max_staleness is not None:
            why = "not every rank says which weights computed log_probs or old_log_probs"
            yield _unchecked(given, ["sampling.max_staleness"], why)
        return
    trained = given.version_of(name)
    assert trained is not None
    behind = trained[owner] - versions
    bound = given.settings.sampling.max_staleness
    if bound is not None and behind.max() > bound:
        old = np.unique(owner[behind > bound])
        row = int(owner[behind.argmax()])
        message = (
            f"{len(old)} samples are more than {bound} weight versions behind those that computed "
            f"{name}, the most {int(behind.max())}, version {int(versions[behind.argmax()])} "
            f"against {int(trained[row])}: the settings allow {bound}"
        )
        yield given.finding("weights.stale", "error", message, sample=row)

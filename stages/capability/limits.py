"""What the V2 matrix makes less than recomputed, found by asking it value by value."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import SECTIONS, Settings, with_changes
from trajreplay.schema.settings.knobs import Kind, kinds
from trajreplay.schema.tables import STEPS
from trajreplay.stages.capability import v2
from trajreplay.stages.capability.batches import over_batches, over_trajectories
from trajreplay.stages.capability.losses import INSPECTED

# Settings beside which every other one can act.
_ACTING = {
    "reward.n_samples_per_prompt": 4,
    "reward.weights": {"answer": 1.0, "format": 1.0},
    "reward.batch_epsilon": 0.0,
    "advantage.whiten": "sample",
    "loss.batch_reduction": "mean",
    "loss.kl_loss_coef": 0.1,
    "loss.correction": "tis",
    "loss.correction_bounds": (0.0, 2.0),
    "loss.correction_norm": "token",
}
_SHARD = ParallelCoordinates(context_size=2)
_ROWS = frozenset({"context_rank", "context_size"})
_HELD = frozenset(STEPS.names) - _ROWS


def limits(stage: str, label: str) -> tuple[str, ...]:
    """Where a stage is less than recomputed for a setting, a clause each.

    Args:
        stage: The stage.
        label: The setting, `section.field`.

    >>> limits("loss.policy", "loss.nll_coef")[0]
    'inspect-only: loss.nll_coef is stated, and the micro-batch of samples was not captured'
    """
    section, _, name = label.partition(".")
    kind = kinds(SECTIONS[section])[name]
    found: dict[str, None] = {}
    for value in _values(label, kind):
        settings = with_changes(Settings(), {**_ACTING, label: value})
        found |= dict.fromkeys(_of(stage, settings, label))
    return tuple(one for one in found if label in one or one not in _everywhere(stage))


def _values(label: str, kind: Kind) -> Iterator[Any]:
    """Every name that a setting knows, those that are only inspected, or a number."""
    yield from (*kind.known, *INSPECTED.get(label, ())) if kind.what == "name" else ()
    if kind.what == "number":
        yield 0.5


@lru_cache
def _everywhere(stage: str) -> frozenset[str]:
    """What holds whatever a single setting says."""
    return frozenset(_of(stage, with_changes(Settings(), _ACTING), ""))


def _of(stage: str, settings: Settings, label: str) -> Iterator[str]:
    plain = v2.ability(stage, settings, ParallelCoordinates(), _HELD)
    if plain.capability == "inspect-only":
        yield f"{plain.capability}: {plain.reason}"
    own = label == "layout.context"
    zigzag, whole = (
        settings if own else with_changes(settings, {"layout.context": context})
        for context in ("zigzag", "whole")
    )
    for one, place, columns in (
        (settings, ParallelCoordinates(), _HELD - {"micro_batch_id"}),
        (zigzag, _SHARD, _HELD),
        (whole, _SHARD, _HELD),
        (settings, ParallelCoordinates(), _HELD | _ROWS),
    ):
        found = v2.ability(stage, one, place, columns)
        if found.capability != "recompute" and found.reason != plain.reason:
            yield f"{found.capability}: {found.reason}"
    for named in (over_batches(stage, settings, plain), over_trajectories(stage, settings)):
        if named:
            yield f"unverified: {named}, and a step holds a part of a rollout"

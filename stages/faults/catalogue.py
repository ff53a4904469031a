"""The catalogue: every fault that is known, in the order in which one is tried and believed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points

from trajreplay.schema.errors import StageError
from trajreplay.stages.faults import (
    advantages,
    clips,
    contracts,
    filters,
    groupings,
    handoffs,
    kl,
    kl_columns,
    loss_columns,
    loss_terms,
    metrics,
    profiles,
    provenance,
    raw,
    reductions,
    rewards,
    shaping,
    whitening,
)
from trajreplay.stages.faults.fault import Fault
from trajreplay.stages.plugins import find_plugin

GROUP = "trajreplay.faults"
FAULTS: tuple[Fault, ...] = (
    *contracts.FAULTS,
    *provenance.FAULTS,
    *handoffs.FAULTS,
    *raw.FAULTS,
    *groupings.FAULTS,
    *filters.FAULTS,
    *rewards.FAULTS,
    *shaping.FAULTS,
    *kl.FAULTS,
    *kl_columns.FAULTS,
    *advantages.FAULTS,
    *whitening.FAULTS,
    *loss_terms.FAULTS,
    *clips.FAULTS,
    *loss_columns.FAULTS,
    *reductions.FAULTS,
    *metrics.FAULTS,
    *profiles.FAULTS,
)


@cache
def catalogue() -> tuple[Fault, ...]:
    """All faults: our own, and those that installed packages add.

    An entry point of the group `trajreplay.faults` names a function without arguments that
    returns faults.

    Raises:
        StageError: One cannot be loaded, gives something else, or an id is there twice.
    """
    found = [*FAULTS, *_installed()]
    ids = [one.id for one in found]
    twice = sorted({one for one in ids if ids.count(one) > 1})
    if twice:
        raise StageError(f"the fault {twice[0]!r} is in the catalogue twice")
    return tuple(found)


def fault_named(name: str) -> Fault:
    """Look a fault up.

    Raises:
        StageError: There is none of that id.
    """
    for one in catalogue():
        if one.id == name:
            return one
    raise StageError(f"no fault {name!r}", hint="To list them: trajreplay faults")


def _installed() -> Iterator[Fault]:
    for name in sorted(set(entry_points(group=GROUP).names)):
        plugin = find_plugin(GROUP, name)
        for one in plugin.function():
            if not isinstance(one, Fault):
                found = type(one).__name__
                message = f"the entry point {name!r} of {GROUP} gives a {found}, expected faults"
                raise StageError(message)
            yield one

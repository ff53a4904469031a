"""The catalogue: every fault that is known, in the order in which one is tried and believed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points

from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.errors import StageError
from trajreplay.stages.faults import (
    advantages,
    clips,
    contracts,
    corrections,
    filters,
    groupings,
    handoffs,
    kl,
    kl_columns,
    loss_columns,
    loss_terms,
    means,
    metrics,
    profiles,
    provenance,
    raw,
    reductions,
    rewards,
    shaping,
    value,
    whitening,
)
from trajreplay.stages.faults.fault import Fault
from trajreplay.stages.plugins import find_plugin, guarded

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
    *corrections.FAULTS,
    *clips.FAULTS,
    *loss_columns.FAULTS,
    *reductions.FAULTS,
    *means.FAULTS,
    *metrics.FAULTS,
    *value.FAULTS,
    *profiles.FAULTS,
)


def catalogue() -> tuple[Fault, ...]:
    """All faults: our own, and those that installed packages add.

    An entry point of the group `trajreplay.faults` names a function without arguments that
    returns faults. One that fails adds none, and `not_loaded` says so.
    """
    return _loaded()[0]


def not_loaded() -> tuple[str, ...]:
    """Why faults of installed packages are not in the catalogue, one sentence each."""
    return _loaded()[1]


def fault_named(name: str) -> Fault:
    """Look a fault up.

    Raises:
        StageError: There is none of that id.
    """
    for one in catalogue():
        if one.id == name:
            return one
    raise StageError(f"no fault {name!r}", hint="To list them: trajreplay faults")


@cache
def _loaded() -> tuple[tuple[Fault, ...], tuple[str, ...]]:
    faults, failed = {one.id: one for one in FAULTS}, []
    for name in sorted(set(entry_points(group=GROUP).names)):
        where = f"the entry point {name!r} of {GROUP}"
        try:
            plugin = find_plugin(GROUP, name)
            where += f", {plugin.origin},"
            with guarded(where):
                given = list(plugin.function())
        except StageError as error:
            failed.append(error.message)
            continue
        for one in given:
            if not isinstance(one, Fault):
                failed.append(f"{where} gives a {type(one).__name__}, expected faults")
            elif not _is_complete(one):
                failed.append(
                    f"{where} gives a fault without text for its id, stage, sentence or lists"
                )
            elif one.stage not in STAGE_NAMES:
                known = ", ".join(STAGE_NAMES)
                said = f"of the stage {one.stage!r}, expected {known}"
                failed.append(f"{where} gives the fault {one.id!r} {said}")
            elif one.tries is None and one.hands is None:
                failed.append(f"{where} gives the fault {one.id!r} with neither tries nor hands")
            elif one.id in faults:
                failed.append(f"{where} gives the fault {one.id!r}, which is there already")
            else:
                faults[one.id] = replace(one, origin=plugin.origin)
    return tuple(faults.values()), tuple(failed)


def _is_complete(fault: Fault) -> bool:
    texts: tuple[object, ...] = (fault.id, fault.name, fault.stage, fault.sentence, fault.look)
    if not all(isinstance(one, tuple) for one in (fault.references, fault.touches)):
        return False
    lists = (*fault.references, *fault.touches)
    return all(isinstance(one, str) and one != "" for one in (*texts, *lists))

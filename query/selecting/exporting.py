"""What an export takes of a lake: whole capture sets, complete, and what they were made from."""

from __future__ import annotations

from collections.abc import Iterator

from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.query.selecting.closure import source_rollouts
from trajreplay.query.selecting.selection import Selected, Selection, select
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError


def selected_sets(catalog: Catalog, selection: Selection) -> list[CaptureSet]:
    """The capture sets that a selection touches, each whole.

    Raises:
        QueryError: The selection is wrong or selects nothing.
        DatasetError: One of them is incomplete or damaged.
    """
    found = select(catalog, selection)
    return [_complete(found.sets[cohort]) for cohort in found.cohorts]


def selected_entries(catalog: Catalog, selection: Selection) -> Iterator[Entry]:
    """The captures that a selection touches, with the rollouts that its steps consumed from.

    Raises:
        QueryError: The selection is wrong or selects nothing.
        DatasetError: A capture set is incomplete or damaged.
    """
    found = select(catalog, selection)
    cohorts = dict.fromkeys(found.cohorts)
    for cohort in found.cohorts:
        sources = (one for one in source_rollouts(found.sets[cohort]) if one in found.sets)
        cohorts.update(dict.fromkeys(sources))
    for cohort in cohorts:
        yield from _complete(found.sets[cohort]).entries
    yield from _events(catalog, found, cohorts)


def _events(catalog: Catalog, found: Selected, cohorts: dict[Cohort, None]) -> Iterator[Entry]:
    """The events of the rollouts and steps that are taken."""
    places = {(one.run_id, one.attempt, one.rollout_id) for one in cohorts}
    for key in catalog.keys:
        if key.kind == "events" and (key.run_id, key.attempt, key.rollout_id) in places:
            yield catalog.entry(key)


def _complete(captures: CaptureSet) -> CaptureSet:
    problems = captures.refusals()
    if problems:
        raise DatasetError(
            f"{captures.cohort}: {problems[0]}",
            hint="Only whole rollouts and steps are exported: select others.",
        )
    return captures

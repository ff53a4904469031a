"""One of two runs that are held against each other."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.query.manifest.capture_sets import CaptureSets, capture_sets
from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.query.manifest.lineage import lineages


@dataclass(frozen=True)
class Side:
    """One of the two: a run of a lake, in the lineage of its newest attempt or of another.

    Args:
        catalog: The lake.
        run_id: The run.
        attempt: The attempt that is followed; None for the newest.
        sets: Its capture sets.
    """

    catalog: Catalog
    run_id: str
    attempt: int | None
    sets: CaptureSets

    def __str__(self) -> str:
        attempt = "" if self.attempt is None else f" attempt {self.attempt}"
        return f"run {self.run_id}{attempt}"

    @property
    def cohorts(self) -> dict[tuple[int, int | None], Cohort]:
        """Its cohorts by rollout and step."""
        return {(one.rollout_id, one.step_id): one for one in self.sets}


def side_of(catalog: Catalog, run_id: str | None = None, attempt: int | None = None) -> Side:
    """One side.

    Args:
        catalog: The lake.
        run_id: The run; may be left out where the lake has only one.
        attempt: The attempt to follow, instead of the newest.

    Raises:
        QueryError: There is no such run or attempt, or several runs and none was named.
    """
    run_id = catalog.only_run() if run_id is None else run_id
    return Side(catalog, run_id, attempt, capture_sets(catalog, lineages(catalog, run_id, attempt)))

"""Which attempts of a run count: the newest, and of those it continues what lies before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.schema.errors import DatasetError, QueryError
from trajreplay.schema.identity import CaptureKey


@dataclass(frozen=True)
class Lineage:
    """What is visible of one run.

    Args:
        run_id: The run.
        branches: One mapping per chain of attempts that nothing connects to another: attempt to
            the first rollout that is superseded in it, None for all of it.
        overlaps: Cohorts that several branches hold, and the attempts that do.
    """

    run_id: str
    branches: tuple[dict[int, int | None], ...]
    overlaps: dict[Cohort, tuple[int, ...]] = field(default_factory=dict)

    @property
    def attempts(self) -> tuple[int, ...]:
        """Attempts of which anything is visible, in order."""
        return tuple(sorted(attempt for branch in self.branches for attempt in branch))

    def shows(self, key: CaptureKey | Cohort) -> bool:
        """Whether a capture of this run is visible; events of no rollout follow their attempt."""
        for branch in self.branches:
            if key.attempt in branch:
                stop = branch[key.attempt]
                return stop is None or key.rollout_id is None or key.rollout_id < stop
        return False


def lineages(
    catalog: Catalog, run_id: str | None = None, attempt: int | None = None
) -> dict[str, Lineage]:
    """The lineage of one run or of all.

    Args:
        catalog: The lake.
        run_id: The run; all runs if omitted.
        attempt: Follow this attempt and what it continues, instead of the newest of each branch.

    Returns:
        Lineages by run; runs without that attempt are left out.

    Raises:
        QueryError: No such run, or no run has that attempt.
        DatasetError: An attempt continues itself or a later one, or a record is damaged.
    """
    runs = catalog.runs if run_id is None else {run_id: catalog.runs[catalog.check_run(run_id)]}
    if attempt is not None:
        having = {run: found for run, found in runs.items() if attempt in found}
        if not having:
            there = "; ".join(f"{run}: {_listed(found)}" for run, found in runs.items()) or "none"
            raise QueryError(
                f"no attempt {attempt}, expected one of {there}",
                hint="To list the attempts of each run: trajreplay info",
            )
        return {run: Lineage(run, (_chain(catalog, run, attempt),)) for run in having}
    return {run: _whole_lineage(catalog, run, found) for run, found in runs.items()}


def _whole_lineage(catalog: Catalog, run_id: str, attempts: Iterable[int]) -> Lineage:
    newest_of: dict[int, dict[int, int | None]] = {}
    for attempt in sorted(attempts):
        chain = _chain(catalog, run_id, attempt)
        newest_of[min(chain)] = chain  # a later attempt of the same root supersedes its siblings
    branches = tuple(newest_of.values())
    return Lineage(run_id, branches, _overlaps(catalog, Lineage(run_id, branches)))


def _chain(catalog: Catalog, run_id: str, attempt: int) -> dict[int, int | None]:
    chain: dict[int, int | None] = {attempt: None}
    stop: int | None = None
    while (resumed := catalog.resumed_from(run_id, attempt)) is not None:
        if resumed.attempt >= attempt:
            raise DatasetError(
                f"run {run_id!r}: attempt {attempt} is recorded as resumed from attempt "
                f"{resumed.attempt}, expected an earlier one",
                hint="To read one attempt alone, give an earlier one: --attempt N",
            )
        attempt = resumed.attempt
        stop = resumed.rollout_id if stop is None else min(stop, resumed.rollout_id)
        chain[attempt] = stop
    return chain


def _overlaps(catalog: Catalog, lineage: Lineage) -> dict[Cohort, tuple[int, ...]]:
    if len(lineage.branches) < 2:
        return {}
    holders: dict[tuple[int, int | None], list[Cohort]] = {}
    for cohort in catalog.by_cohort:
        if cohort.run_id == lineage.run_id and lineage.shows(cohort):
            holders.setdefault((cohort.rollout_id, cohort.step_id), []).append(cohort)
    return {
        cohort: tuple(one.attempt for one in cohorts)
        for cohorts in holders.values()
        if len(cohorts) > 1
        for cohort in cohorts
    }


def _listed(attempts: Iterable[int]) -> str:
    return ", ".join(map(str, attempts))

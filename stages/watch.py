"""A lake followed while it is written: every cohort is replayed once, when it is whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trajreplay.query import Selection
from trajreplay.query.manifest.capture_sets import CaptureSet, CaptureSets, capture_sets
from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.query.manifest.lineage import lineages
from trajreplay.query.selecting.closure import source_rollouts
from trajreplay.schema.errors import DatasetError, QueryError
from trajreplay.schema.identity import DATA
from trajreplay.schema.store import Store
from trajreplay.stages.gate import CheckVerdict, CohortGate, Policy
from trajreplay.stages.replaying.plan import replay
from trajreplay.stages.report import CohortReport

WAIT = 3
_SHORT_S = 2.0  # how long reports may wait for others that are made with them
_FORMAT = 1
_MOST_BYTES = 256 << 20


@dataclass
class Watch:
    """What was reported of a lake, and what comes next.

    Args:
        store: The lake.
        run: Only this run; it need not have begun.
        attempt: Only what this attempt's lineage shows.
        seen: Cohorts that were reported; no other is reported twice.
        pending: Cohorts of the last look that wait for captures.
        policy: What every cohort is held against; `gate` says nothing without one.
        wait: Looks for which a step waits for a rollout that it names as a source and of which
            nothing is there; after those it is reported without that hand-off, since rollouts may
            not be captured at all.

    Raises:
        QueryError: The policy demands nothing of a single cohort.
    """

    store: Store
    run: str | None = None
    attempt: int | None = None
    seen: set[Cohort] = field(default_factory=set)
    pending: int = 0
    policy: Policy | None = None
    wait: int = WAIT

    def __post_init__(self) -> None:
        self._gate = None if self.policy is None else CohortGate(self.policy)
        self._catalog: Catalog | None = None
        self._looks: dict[Cohort, int] = {}
        self._shown: set[Cohort] = set()

    def poll(self) -> Iterator[CohortReport]:
        """Look once: the reports of cohorts that became whole, or can never be, in order.

        A step waits for the rollouts it consumed from: as long as anything of those is there until
        they are final, else `wait` looks. Reports are made as they are asked for, of a few
        rollouts at a time.

        Raises:
            DatasetError: The lake cannot be listed.
        """
        catalog = self._catalog = Catalog.open(self.store)
        self._shown = set()
        if not self._has_begun(catalog):
            return iter(())
        sets = capture_sets(catalog, lineages(catalog, self.run, self.attempt))
        self._shown = set(sets)
        unseen = [cohort for cohort in sets if cohort not in self.seen]
        ready = {cohort for cohort in unseen if self._is_ready(catalog, sets, cohort)}
        self.pending = len(unseen) - len(ready)
        return self._replayed(catalog, ready)

    def _replayed(self, catalog: Catalog, ready: set[Cohort]) -> Iterator[CohortReport]:
        """The reports, of as many rollouts at a time as take a short while."""
        for run in sorted({one.run_id for one in ready}):
            of_run = [one for one in ready if one.run_id == run]
            rollouts = sorted({one.rollout_id for one in of_run})
            size = 1
            while rollouts:
                piece, rollouts = set(rollouts[:size]), rollouts[size:]
                began = time.monotonic()
                reports = self._reports(catalog, [x for x in of_run if x.rollout_id in piece])
                took = time.monotonic() - began
                yield from reports
                size = size * 2 if took < _SHORT_S else max(1, size // 2)

    def _reports(self, catalog: Catalog, ready: list[Cohort]) -> list[CohortReport]:
        """The reports of some cohorts of a run, in order."""
        found: dict[Cohort, CohortReport] = {}
        for selection in self._selections(ready):
            for one in replay(catalog, selection).cohorts:
                cohort = Cohort(one.run_id, one.attempt, one.rollout_id, one.step_id)
                if cohort in ready:
                    found[cohort] = one
        return [found[cohort] for cohort in sorted(found, key=lambda one: one.order)]

    @property
    def reported(self) -> int:
        """How many cohorts of the last look were reported, by this watch or an earlier one."""
        return len(self._shown & self.seen)

    def gate(self, one: CohortReport) -> tuple[CheckVerdict, ...]:
        """What the policy's checks say of a report of the last look, those that fail first."""
        if self._gate is None or self._catalog is None:
            return ()
        return self._gate.judge(self._catalog, one)

    def done(self, one: CohortReport) -> None:
        """Note that a report was handed on."""
        cohort = Cohort(one.run_id, one.attempt, one.rollout_id, one.step_id)
        self.seen.add(cohort)
        self._looks.pop(cohort, None)

    def _has_begun(self, catalog: Catalog) -> bool:
        attempts = catalog.runs.get(self.run, ()) if self.run is not None else None
        if attempts is None:
            return self.attempt is None or any(self.attempt in one for one in catalog.runs.values())
        return bool(attempts) and (self.attempt is None or self.attempt in attempts)

    def _is_ready(self, catalog: Catalog, sets: CaptureSets, cohort: Cohort) -> bool:
        one = sets[cohort]
        if not _is_final(catalog, one):
            return False
        sources = source_rollouts(one) if one.step_id is not None and one.entries else ()
        if not all(_is_final(catalog, sets[source]) for source in sources if source in sets):
            return False
        # What another attempt superseded is there, and will never be shown.
        absent = any(one not in sets and one not in catalog.by_cohort for one in sources)
        looks = self._looks[cohort] = self._looks.get(cohort, 0) + absent
        return not absent or looks > self.wait

    def _selections(self, ready: list[Cohort]) -> Iterator[Selection]:
        """A selection a rollout, since one of a rollout has its steps too; else of the steps."""
        for run, attempt in sorted({(one.run_id, one.attempt) for one in ready}):
            of = [one for one in ready if (one.run_id, one.attempt) == (run, attempt)]
            rollouts = sorted(one.rollout_id for one in of if one.step_id is None)
            steps = sorted(
                (one.rollout_id, one.step_id)
                for one in of
                if one.step_id is not None and one.rollout_id not in rollouts
            )
            if rollouts:
                yield self._selection(run, rollouts=tuple(rollouts))
            if steps:
                yield self._selection(run, steps=tuple(steps))

    def _selection(self, run: str, **what: Any) -> Selection:
        return Selection(run=run, attempt=self.attempt, **what)


def load_state(path: Path, lake: str) -> set[Cohort]:
    """The cohorts that an earlier watch of a lake reported; none where there is no file yet.

    Raises:
        QueryError: The file is no such state, or is that of another lake.
    """
    if not path.exists():
        return set()
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["format"] != _FORMAT:
            raise ValueError(f"format {tree['format']!r}, expected {_FORMAT}")
        seen = {
            Cohort(str(run), int(attempt), int(rollout), None if step is None else int(step))
            for run, attempt, rollout, step in tree["seen"]
        }
        of = tree["lake"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise QueryError(
            f"{path} is no state of a watch: {error}", hint="Name another file, or remove it."
        ) from error
    if of != lake:
        raise QueryError(
            f"{path} is the state of a watch of {of}, expected of {lake}",
            hint="Name another file: each lake has its own.",
        )
    return seen


def save_state(path: Path, lake: str, seen: set[Cohort]) -> None:
    """Write the state, whole or not at all.

    Raises:
        DatasetError: It cannot be written.
    """
    tree = {
        "format": _FORMAT,
        "lake": lake,
        "seen": [list(one) for one in sorted(seen, key=lambda one: one.order)],
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps(tree), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise DatasetError(f"{path}: the state cannot be written: {error.strerror}") from error


def _is_final(catalog: Catalog, one: CaptureSet) -> bool:
    """Whether every expected rank has committed or given up, or what is there contradicts."""
    if one.complete or one.problems:
        return True
    keys = catalog.by_cohort[one.cohort]
    dropped = {key.rank for key in keys if key.part != DATA}
    expected = set(one.expected_ranks)
    return bool(expected) and expected <= dropped | set(one.ranks)

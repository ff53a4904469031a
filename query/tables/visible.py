"""Which captures the tables of SQL show, and which they leave out, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

import pyarrow as pa

from trajreplay.query.manifest.capture_sets import CaptureSets
from trajreplay.query.manifest.catalog import Catalog, Cohort, cohort_of
from trajreplay.query.manifest.lineage import lineages
from trajreplay.query.tables.pruning import PushedFilter, rows_that_may_match
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import DATA, CaptureKey
from trajreplay.schema.tables import STEPS

_ENTRIES_AT_ONCE = 256
_SOURCES = pa.schema(
    [
        pa.field("index", pa.int64()),
        *(STEPS[name].field for name in ("run_id", "source_attempt", "source_rollout_id")),
    ]
)


class Visible:
    """What one query sees of a lake.

    Args:
        catalog: The lake.
        run_id: Only this run.
        attempt: The lineage of this attempt, instead of the newest.
        allow_partial: Show incomplete capture sets and superseded attempts too.
        only: Show the capture sets of these cohorts, complete or not.
        tolerant: Note a damaged file and go on, instead of ending the scan.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        run_id: str | None = None,
        attempt: int | None = None,
        allow_partial: bool = False,
        only: Collection[Cohort] | None = None,
        tolerant: bool = False,
    ) -> None:
        self.catalog = catalog
        self.run_id = run_id
        self.attempt = attempt
        self.sets = CaptureSets(catalog, lineages(catalog, run_id, attempt))
        self.allow_partial = allow_partial
        self.only = only
        self.tolerant = tolerant
        self.incomplete: dict[Cohort, str] = {}
        self.superseded: set[Cohort] = set()
        self.damaged: dict[CaptureKey, DatasetError] = {}
        self.errors: list[Exception] = []
        self.scanned: set[str] = set()  # tables of which rows were asked for

    def entries(self, keys: Iterable[CaptureKey]) -> Iterator[Entry]:
        """The entries to show among these keys: data of owners, each once."""
        for key in keys:
            if key.part == DATA and self._shows(key):
                try:
                    entry = self.catalog.entry(key)
                except DatasetError as error:
                    self.damaged[key] = error
                    continue
                if entry.owner:
                    yield entry

    def lists(self, key: CaptureKey) -> bool:
        """Whether the table `manifest` has a row for a capture: all of the run and attempt named.

        An attempt stands for what it continues, too.
        """
        if self.run_id is None and self.attempt is None:
            return True
        lineage = self.sets.lineages.get(key.run_id)
        return lineage is not None and (self.attempt is None or key.attempt in lineage.attempts)

    @property
    def is_partial(self) -> bool:
        """Whether something of what was asked for was left out as incomplete or damaged."""
        return bool(self.incomplete or self.damaged)

    def _shows(self, key: CaptureKey) -> bool:
        if self.run_id is not None and key.run_id != self.run_id:
            return False
        if key.kind == "events":
            lineage = self.sets.lineages.get(key.run_id)
            return self.allow_partial or (lineage is not None and lineage.shows(key))
        cohort = cohort_of(key)
        if self.only is not None:
            return cohort in self.only
        if self.allow_partial:
            return True
        if cohort not in self.sets:
            self.superseded.add(cohort)
            return False
        if self.sets[cohort].complete:
            return True
        self.incomplete[cohort] = self.sets[cohort].refusals()[0]
        return False

    def notes(self) -> tuple[str, ...]:
        """What was left out of what was read so far, one sentence each."""
        notes = []
        if self.incomplete:
            first, reason = next(iter(self.incomplete.items()))
            notes.append(
                f"{_count(len(self.incomplete), 'capture set')} left out as incomplete, the first: "
                f"{first}: {reason}"
            )
        if self.superseded:
            notes.append(
                f"{_count(len(self.superseded), 'capture set')} of superseded attempts left out"
            )
        notes += [f"left out: {error.message}" for error in self.damaged.values()]
        return tuple(notes)


def consuming(pushed: PushedFilter | None, entries: Iterator[Entry]) -> Iterator[Entry]:
    """Entries of steps that may match a filter, as far as the sources that they list tell."""
    fields = frozenset() if pushed is None else pushed.fields()
    if pushed is None or fields is None or not fields & set(_SOURCES.names[2:]):
        yield from entries
        return
    on_keys = pushed.on_keys(_SOURCES.names[1:])
    while some := list(islice(entries, _ENTRIES_AT_ONCE)):
        sources = [
            dict(zip(_SOURCES.names, (index, entry.key.run_id, *source), strict=True))
            for index, entry in enumerate(some)
            for source in entry.sources
        ]
        known = rows_that_may_match(pa.Table.from_pylist(sources, _SOURCES), on_keys)
        kept = set(known.column("index").to_pylist())
        yield from (entry for index, entry in enumerate(some) if index in kept)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)

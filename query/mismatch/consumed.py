"""What a step takes from the rollouts that it consumed: columns that its own captures lack."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.capture_sets import CaptureSet
from trajreplay.query.catalog import Catalog, Cohort
from trajreplay.query.reading import read_columns
from trajreplay.schema.entry import Entry
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.tables import ROLLOUTS, STEPS

IDENTITY = ("source_attempt", "source_rollout_id", "sample_id")
_KEPT_ROLLOUTS = 32


class Consumed:
    """The rollouts that steps consumed from; the last ones read are kept.

    Args:
        catalog: The lake.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._rows = lru_cache(maxsize=_KEPT_ROLLOUTS)(self._read)

    def sources(self, captures: CaptureSet) -> tuple[Entry, ...]:
        """Captures of the rollouts that a step consumed from; none of a rollout."""
        if captures.kind == "rollout":
            return ()
        rollouts = sorted({one for entry in captures.owners for one in entry.sources})
        return tuple(
            self._catalog.entry(key)
            for source in rollouts
            for key in self._catalog.by_cohort.get(Cohort(captures.run_id, *source, None), ())
            if key.part == "data" and self._catalog.entry(key).owner
        )

    def givers(self, captures: CaptureSet, entry: Entry, column: str) -> tuple[Entry, ...]:
        """The entries whose data a column is: the capture's own, else those it consumed from."""
        if column in columns_of(entry) or captures.kind == "rollout":
            return (entry,)
        return tuple(one for one in self.sources(captures) if column in columns_of(one))

    def fill(self, captures: CaptureSet, found: dict[str, Any], columns: Sequence[str]) -> None:
        """Take from the rollouts what a step's captures lack.

        Args:
            captures: The step.
            found: Its columns by name, IDENTITY among them; those that lack rows are replaced.
            columns: Which of them to fill.
        """
        wanted = [one for one in columns if found[one].null_count]
        if not wanted:
            return
        places: dict[Any, int] = {}
        tables = []
        for entry in self.sources(captures):
            rows = self._rows(entry.key, tuple(wanted))
            for name in rows["sample_id"].to_pylist():
                places[entry.key.attempt, entry.key.rollout_id, name] = len(places)
            tables.append(rows)
        if not tables:
            return
        there = pa.concat_tables(tables)
        mine = zip(*(found[name].to_pylist() for name in IDENTITY), strict=True)
        taken = there.take(pa.array([places.get(one) for one in mine], pa.int64()))
        for name in wanted:
            # coalesce has no kernel for lists of structs
            own = pc.is_valid(found[name]).to_pylist()
            both = pa.concat_arrays([found[name], taken[name].combine_chunks()])
            places_of = [row if valid else row + len(own) for row, valid in enumerate(own)]
            found[name] = both.take(pa.array(places_of, pa.int64()))

    def _read(self, key: CaptureKey, columns: tuple[str, ...]) -> pa.Table:
        entry = self._catalog.entry(key)
        return read_columns(self._catalog.store, entry, ROLLOUTS, ["sample_id", *columns])


def columns_of(entry: Entry) -> tuple[str, ...]:
    """The columns that the samples of a capture have."""
    file = entry.file(STEPS.name if entry.key.kind == "step" else ROLLOUTS.name)
    return () if file is None else tuple(file.columns)

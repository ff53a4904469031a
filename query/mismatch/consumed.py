"""What a step takes from the rollouts that it consumed: columns that its own captures lack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajreplay.query.files.reading import read_columns
from trajreplay.query.files.row_identity import SHARD, WHOLE, Shard, names_of, shards_of
from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.lists import Int64s
from trajreplay.schema.tables import ROLLOUTS, STEPS

_KEPT_SOURCES = 2  # of all that a step consumed, which each of its ranks looks at
_NOBODY = -1


class Given(NamedTuple):
    """Which captures the rows of a column are from.

    Args:
        entries: Those captures.
        of_row: (R,) int64. The one of each row, by place in `entries`, -1 of a row without; None
            where all are the first's.
    """

    entries: tuple[Entry, ...]
    of_row: Int64s | None = None

    @property
    def used(self) -> tuple[Entry, ...]:
        """Those that gave a row."""
        if self.of_row is None:
            return self.entries[:1]
        return tuple(self.entries[one] for one in np.unique(self.of_row) if one != _NOBODY)

    def told(self, of_entry: Sequence[int | None], rows: int) -> pa.Array:
        """(R,) int64. What is told of the capture of each row.

        Args:
            of_entry: Of each of `entries`, None where it is not known.
            rows: How many there are.
        """
        values = pa.array(of_entry, pa.int64())
        if self.of_row is None:
            return pa.repeat(values[0], rows)
        return values.take(pa.array(self.of_row, mask=self.of_row == _NOBODY))


def together(one: Given, other: Given) -> list[tuple[Entry, Entry]]:
    """The captures that two columns of one row are from, of all rows."""
    places = [np.zeros(1, np.int64) if of is None else of for of in (one.of_row, other.of_row)]
    first, second = np.broadcast_arrays(*places)
    known = (first != _NOBODY) & (second != _NOBODY)
    pairs = set(zip(first[known].tolist(), second[known].tolist(), strict=True))
    return [(one.entries[left], other.entries[right]) for left, right in sorted(pairs)]


class _Generated(NamedTuple):
    """The rows of consumed rollouts: their captures, columns, and places by sample and shard."""

    entries: tuple[Entry, ...]
    of_row: Int64s
    columns: pa.Table
    places: dict[tuple[Any, Shard], int]

    def place(self, name: Any, shard: Shard) -> int | None:
        """Where the same shard of a sample is, else the whole of it."""
        own = self.places.get((name, shard))
        return self.places.get((name, WHOLE)) if own is None else own


class Consumed:
    """The rollouts that steps consumed from; those of the last steps are kept.

    Args:
        catalog: The lake.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._generated = lru_cache(maxsize=_KEPT_SOURCES)(self._read)

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

    def fill(
        self, captures: CaptureSet, entry: Entry, found: dict[str, Any], columns: Sequence[str]
    ) -> dict[str, Given]:
        """Take from the rollouts what a step's capture lacks.

        Args:
            captures: The step.
            entry: Its capture.
            found: Columns of the capture by name, `IDENTITY` and `SHARD` among them where any lacks
                rows; those that do are replaced.
            columns: Which of them to fill.

        Returns:
            Of each of these, the captures that its rows are from.

        Raises:
            DatasetError: A rollout holds a sample twice, with other values.
        """
        own = {name: Given((entry,)) for name in columns}
        wanted = tuple(one for one in columns if found[one].null_count)
        if not wanted or captures.kind == "rollout" or "sample_id" not in found:
            return own
        generated = self._generated(tuple(one.key for one in self.sources(captures)), wanted)
        mine = zip(names_of(found), shards_of(entry, found), strict=True)
        places = pa.array([generated.place(*one) for one in mine], pa.int64())
        taken = generated.columns.take(places)
        givers = (entry, *generated.entries)
        from_rollouts = np.asarray(places.fill_null(_NOBODY).to_numpy())
        of_row = np.append(generated.of_row, _NOBODY)[from_rollouts] + 1
        for name in wanted:
            # coalesce has no kernel for lists of structs
            valid = np.asarray(found[name].is_valid().to_numpy(zero_copy_only=False), np.bool_)
            rows = np.arange(len(valid))
            both = pa.concat_arrays([found[name], taken[name].combine_chunks()])
            found[name] = both.take(pa.array(np.where(valid, rows, rows + len(rows))))
            there = np.asarray(found[name].is_valid().to_numpy(zero_copy_only=False), np.bool_)
            own[name] = Given(givers, np.where(valid, 0, np.where(there, of_row, _NOBODY)))
        return own

    def _read(self, keys: tuple[CaptureKey, ...], wanted: tuple[str, ...]) -> _Generated:
        entries = tuple(map(self._catalog.entry, keys))
        names = ["sample_id", *SHARD, *wanted]
        tables = [read_columns(self._catalog.store, one, ROLLOUTS, names) for one in entries]
        schema = pa.schema([ROLLOUTS[name].field for name in wanted])
        columns = pa.concat_tables([schema.empty_table(), *(one.select(wanted) for one in tables)])
        places: dict[tuple[Any, Shard], int] = {}
        named = chain.from_iterable(map(_named, entries, tables))
        for row, (entry, name, shard) in enumerate(named):
            first = places.setdefault((name, shard), row)
            if first != row and not columns.slice(first, 1).equals(columns.slice(row, 1)):
                raise DatasetError(
                    f"capture of {entry.key}: sample {name[-1]!r} is there twice in its rollout, "
                    f"with different {' or '.join(wanted)}: which of both was consumed is not told",
                    hint="Capture each sample on one rank, or its values with the step.",
                )
        counts = [len(one) for one in tables]
        return _Generated(entries, np.repeat(np.arange(len(entries)), counts), columns, places)


def _named(entry: Entry, rows: pa.Table) -> Iterator[tuple[Entry, Any, Shard]]:
    """The capture, sample and shard of each row."""
    for name, shard in zip(rows["sample_id"].to_pylist(), shards_of(entry, rows), strict=True):
        yield entry, (entry.key.attempt, entry.key.rollout_id, name), shard


def columns_of(entry: Entry) -> tuple[str, ...]:
    """The columns that the samples of a capture have."""
    file = entry.file(STEPS.name if entry.key.kind == "step" else ROLLOUTS.name)
    return () if file is None else tuple(file.columns)

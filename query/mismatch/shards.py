"""Whole responses, put together from the shards that context-parallel ranks captured of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.files.row_identity import IDENTITY, SHARD, names_of
from trajreplay.query.mismatch.consumed import columns_of
from trajreplay.schema.columns import Table
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.lists import Int64s, lengths_of
from trajreplay.schema.shard_checks import Cut, check_once, check_tiles, held_spans
from trajreplay.schema.shards import PLACING, SHARDED, Piece, Places, row_places, whole_lists
from trajreplay.schema.tables import STEPS

NEEDED = (*IDENTITY, *SHARD, "padded_length", "total_length", "response_length")
_PLACE = tuple(f"place.{name}" for name in Places._fields)


def needed(table: Table) -> tuple[str, ...]:
    """Of `NEEDED` those that a table has: what a rollout generated is of that rollout."""
    return tuple(one for one in NEEDED if one in table.arrow.names)


def identified(entry: Entry, found: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """The columns of rows, and those that say where a rollout's own are from."""
    if entry.key.kind == "step":
        return dict(found)
    count = len(found["sample_id"])
    of_key = (entry.key.attempt, entry.key.rollout_id, None)
    source = {
        name: pa.repeat(pa.scalar(value, STEPS[name].type), count)
        for name, value in zip(IDENTITY, of_key, strict=True)
        if name not in found
    }
    return {**found, **source}


class Rows(NamedTuple):
    """Rows of one capture: its entry, and their columns by name."""

    entry: Entry
    found: dict[str, pa.Array]

    def take(self, places: pa.Array) -> Rows:
        """Some of them."""
        return Rows(self.entry, {name: one.take(places) for name, one in self.found.items()})

    @property
    def cut(self) -> Cut:
        """How their samples are cut; they are `placed`."""
        return Cut(
            f"capture of {self.entry.key}",
            self.entry.settings.layout,
            self.found["sample_id"].to_pylist(),
            self.ints("total_length"),
            self.ints("response_length"),
            Places(*(self.ints(one) for one in _PLACE)),
        )

    def ints(self, name: str) -> Int64s:
        """(R,) int64. A column of numbers."""
        return np.asarray(self.found[name].to_numpy(zero_copy_only=False), np.int64)


def is_cut(entries: Sequence[Entry]) -> bool:
    """Whether captures may hold shards of responses."""
    return any(
        one.settings.layout.context in SHARDED
        and (one.parallel.context_size > 1 or "context_size" in columns_of(one))
        for one in entries
    )


def placed(entry: Entry, found: Mapping[str, pa.Array]) -> dict[str, pa.Array]:
    """Where the shards of the rows of a capture lie; of all of them, for each may move others."""
    total = np.asarray(found["total_length"].to_numpy(), np.int64)
    stated = {key: found[name].to_pylist() for key, name in PLACING.items()}
    where = f"capture of {entry.key}"
    places = row_places(entry.settings.layout, entry.parallel, total, **stated, where=where)
    return {name: pa.array(values) for name, values in zip(_PLACE, places, strict=True)}


def put_together(parts: Sequence[Rows], columns: Sequence[str]) -> Iterator[Rows]:
    """A row for each sample, under the capture that holds its first shard.

    Args:
        parts: The rows of a capture set, with the columns `NEEDED` and those of `placed`.
        columns: The lists that ranks may hold shards of, or whole.

    Raises:
        DatasetError: Of a sample a shard is missing or there twice, or the list of one is neither
            as long as its tokens under the stated layout nor as the response.
    """
    dynamic = any("context_size" in columns_of(one.entry) for one in parts)
    numbers: dict[tuple[object, ...], int] = {}
    rows: list[Int64s] = []
    for part in parts:
        group = 0 if dynamic else part.entry.parallel.data_rank
        keys = ((group, *name) for name in names_of(part.found))
        rows.append(np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64))
    ids = [str(key[-1]) for key in numbers]
    of_sample = np.concatenate([*rows, np.empty(0, np.int64)])
    none = np.empty(0, np.int64)
    rank, size = (
        np.concatenate([*(part.ints(f"place.{name}") for part in parts), none])
        for name in ("rank", "size")
    )
    check_once(ids, of_sample, rank, size)
    response = np.zeros(len(numbers), np.int64)
    for part, mine in zip(parts, rows, strict=True):
        response[mine] = part.ints("response_length")
    whole = {name: _whole(name, parts, rows, response, ids) for name in columns}
    _, first = np.unique(of_sample, return_index=True)
    start = 0
    for part, mine in zip(parts, rows, strict=True):
        own = first[(first >= start) & (first < start + len(mine))]
        kept = part.take(pa.array(own - start))
        lists = {name: one.take(pa.array(of_sample[own])) for name, one in whole.items()}
        start += len(mine)
        if len(own):
            yield Rows(part.entry, kept.found | lists)


def _whole(
    name: str,
    parts: Sequence[Rows],
    rows: Sequence[Int64s],
    response: Int64s,
    ids: Sequence[str],
) -> pa.Array:
    """The lists of all samples; null of those of which a shard has none."""
    there = np.ones(len(response), np.bool_)
    for part, mine in zip(parts, rows, strict=True):
        there[mine] &= _valid(part.found[name])
    pieces: list[Piece] = []
    for part, mine in zip(parts, rows, strict=True):
        column = part.found[name]
        missing = _valid(column) & ~there[mine]
        if missing.any():
            column = column.take(pa.array(np.arange(len(column)), mask=missing))
        spans = held_spans(name, column, part.cut, there[mine], whole=True)
        pieces.append((column, mine, spans))
    found = whole_lists(pieces, response, there)
    check_tiles(name, found, ids, np.bincount(np.concatenate(rows), minlength=len(ids)))
    if (found.hits > 1).any():
        _check_alike(name, parts, pieces, found.lists)
    return found.lists


def _check_alike(
    name: str, parts: Sequence[Rows], pieces: Sequence[Piece], whole: pa.Array
) -> None:
    """Refuse ranks that hold a whole response, and not the same bit by bit."""
    for part, (column, rows, _) in zip(parts, pieces, strict=True):
        judged = whole.take(pa.array(rows))
        mine, theirs = lengths_of(column), lengths_of(judged)
        for row in np.flatnonzero((mine == theirs) & (mine > 0)).tolist():
            held, other = (one[row].values.to_numpy().tobytes() for one in (column, judged))
            if held != other:
                raise DatasetError(
                    f"capture of {part.entry.key}: {name} of sample "
                    f"{part.found['sample_id'][row].as_py()!r} is not what another rank of its "
                    "context-parallel group has, and each holds the whole response",
                    hint="Find out which is right: trajreplay replay names where they differ.",
                )


def _valid(column: pa.Array) -> Any:
    return np.asarray(pc.is_valid(column).to_numpy(zero_copy_only=False), np.bool_)

"""Whole responses, put together from the shards that context-parallel ranks captured of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.mismatch.consumed import columns_of
from trajreplay.query.row_identity import IDENTITY, SHARD, names_of
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.lists import Int64s, lengths_of
from trajreplay.schema.shards import (
    SHARDED,
    Piece,
    Places,
    Spans,
    WholeLists,
    held_tokens,
    response_spans,
    row_places,
    whole_lists,
)

NEEDED = (*IDENTITY, *SHARD, "total_length", "response_length")
_PLACE = tuple(f"place.{name}" for name in Places._fields)


class Rows(NamedTuple):
    """Rows of one capture: its entry, and their columns by name."""

    entry: Entry
    found: dict[str, pa.Array]

    def take(self, places: pa.Array) -> Rows:
        """Some of them."""
        return Rows(self.entry, {name: one.take(places) for name, one in self.found.items()})

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
    rank, size, batch = (found[name].to_pylist() for name in SHARD)
    places = row_places(
        entry.settings.layout, entry.parallel, total, ranks=rank, sizes=size, batches=batch
    )
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
    _check(parts, rows, [str(key[-1]) for key in numbers])
    of_sample = np.concatenate([*rows, np.empty(0, np.int64)])
    response = np.zeros(len(numbers), np.int64)
    for part, mine in zip(parts, rows, strict=True):
        response[mine] = part.ints("response_length")
    whole = {name: _whole(name, parts, rows, response) for name in columns}
    _, first = np.unique(of_sample, return_index=True)
    start = 0
    for part, mine in zip(parts, rows, strict=True):
        own = first[(first >= start) & (first < start + len(mine))]
        kept = part.take(pa.array(own - start))
        lists = {name: one.take(pa.array(of_sample[own])) for name, one in whole.items()}
        start += len(mine)
        if len(own):
            yield Rows(part.entry, kept.found | lists)


def _check(parts: Sequence[Rows], rows: Sequence[Int64s], names: Sequence[str]) -> None:
    """Refuse samples of which not every shard is there once."""
    there: list[list[tuple[int, int]]] = [[] for _ in names]
    for part, mine in zip(parts, rows, strict=True):
        shards = zip(
            part.ints("place.rank").tolist(), part.ints("place.size").tolist(), strict=True
        )
        for row, shard in zip(mine.tolist(), shards, strict=True):
            there[row].append(shard)
    for name, found in zip(names, there, strict=True):
        size = found[0][1]
        if sorted(found) != [(rank, size) for rank in range(size)]:
            raise DatasetError(
                f"of sample {name!r} the shards (rank, size) {sorted(found)} are selected, "
                "expected those of one size, each rank once",
                hint="Select every rank of a context-parallel group, and capture all of them.",
            )


def _whole(name: str, parts: Sequence[Rows], rows: Sequence[Int64s], response: Int64s) -> pa.Array:
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
        pieces.append((column, mine, _held(name, part, column, there[mine])))
    found = whole_lists(pieces, response, there)
    _check_tiles(name, found, np.bincount(np.concatenate(rows)), response * there)
    if (found.hits > 1).any():
        _check_alike(name, parts, pieces, found.lists)
    return found.lists


def _check_tiles(name: str, found: WholeLists, shards: Int64s, lengths: Int64s) -> None:
    """Refuse samples whose tokens are neither each in one shard nor all in every one."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    once = np.bincount(owner, found.hits == 1, len(lengths)) == lengths
    always = np.bincount(owner, found.hits == shards[owner], len(lengths)) == lengths
    wrong = np.flatnonzero(~(once | always))
    if len(wrong):
        row = int(wrong[0])
        mine = found.hits[found.offsets[row] : found.offsets[row + 1]]
        token = int(np.argmax(mine != 1))
        raise DatasetError(
            f"{name}: {mine[token]} of {shards[row]} shards hold token {token} of a response of "
            f"{lengths[row]}, expected one, or all of them every token: the shards do not tile it"
        )


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


def _held(name: str, part: Rows, column: pa.Array, there: Any) -> Spans:
    """The tokens of each row: of its shard, or all where the list is that of the response."""
    places = Places(*(part.ints(one) for one in _PLACE))
    response, lengths = part.ints("response_length"), lengths_of(column)
    spans = response_spans(part.entry.settings.layout, part.ints("total_length"), response, places)
    held = held_tokens(spans)
    complete = lengths == response
    wrong = there & (lengths != held) & ~complete
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DatasetError(
            f"capture of {part.entry.key}: {name} of sample "
            f"{part.found['sample_id'][row].as_py()!r} has {lengths[row]} values, expected "
            f"{held[row]}, its tokens under the stated layout, or {response[row]}, the whole "
            "response",
            hint="State how sequences were cut: layout.context and layout.context_multiple.",
        )
    (low, high), *others = spans
    every = [(np.where(complete, 0, low), np.where(complete, response, high))]
    none = np.zeros_like(response)
    return every + [
        (np.where(complete, none, one), np.where(complete, none, other)) for one, other in others
    ]


def _valid(column: pa.Array) -> Any:
    return np.asarray(pc.is_valid(column).to_numpy(zero_copy_only=False), np.bool_)

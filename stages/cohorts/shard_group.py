"""The ranks that hold shards of the same samples, and what they hold put together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.columns import has_column
from trajreplay.schema.contracts import STAGE_OF_COLUMN
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.lists import Int64s, lengths_of
from trajreplay.schema.settings import LayoutSettings
from trajreplay.schema.shard_checks import Cut, check_once, check_tiles, held_spans
from trajreplay.schema.shards import SHARDED, Piece, Places, whole_lists
from trajreplay.stages.cohorts.shard_outputs import Part
from trajreplay.stages.report import CohortReport, Finding

_KEY = ("sample_id", "source_attempt", "source_rollout_id")
PLACE = tuple(f"place.{name}" for name in Places._fields)


@dataclass(frozen=True)
class Shards:
    """What one rank holds: of which samples of the group, and which shard of each.

    Args:
        part: The rank.
        rows: (R,) int64. The sample of each of its rows, numbered within the group.
        places: Which shard of it.
    """

    part: Part
    rows: Int64s
    places: Places


class ShardGroup:
    """Ranks that hold shards of the same samples.

    Args:
        parts: The ranks, whose tables have the columns `PLACE`.

    Attributes:
        shards: What each of them holds.
    """

    def __init__(self, parts: list[Part]) -> None:
        numbers: dict[tuple[object, ...], int] = {}
        self.shards: list[Shards] = []
        for part in parts:
            keys = _keys(part.table)
            rows = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
            places = Places(*(np.asarray(part.table[name].to_numpy()) for name in PLACE))
            self.shards.append(Shards(part, rows, places))
        self._names = [str(key[0]) for key in numbers]

    def check(self) -> None:
        """Refuse samples of which not every shard is there once.

        Raises:
            DatasetError: There is one.
        """
        rows = np.concatenate([one.rows for one in self.shards])
        rank = np.concatenate([one.places.rank for one in self.shards])
        size = np.concatenate([one.places.size for one in self.shards])
        check_once(self._names, rows, rank, size)

    @cached_property
    def table(self) -> pa.Table:
        """A row for each sample, as the first rank that holds it has it."""
        first = self.shards[0]
        count = len(self._names)
        if len(first.rows) == count:
            return first.part.table
        rows = np.concatenate([one.rows for one in self.shards])
        _, places = np.unique(rows, return_index=True)
        names = first.part.table.column_names
        return pa.concat_tables([one.part.table.select(names) for one in self.shards]).take(places)

    @property
    def first_ranks(self) -> Int64s:
        """(S,) int64. The rank that holds the first shard of each sample."""
        ranks = np.empty(len(self._names), np.int64)
        for one in self.shards:
            ranks[one.rows[one.places.rank == 0]] = one.part.entry.key.rank
        return ranks

    def scattered(self, name: str, layout: LayoutSettings) -> pa.Array | None:
        """The values of all ranks, each at the place of its token; None if each has all of them.

        Rows that no rank has stay null.
        """
        columns = [one.part.table[name].combine_chunks() for one in self.shards]
        response = np.asarray(self.table["response_length"].to_numpy(), np.int64)
        total = np.asarray(self.table["total_length"].to_numpy(), np.int64)
        pairs = list(zip(self.shards, columns, strict=True))
        if all(_is_whole(column, response[one.rows]) for one, column in pairs):
            return None
        if layout.context not in SHARDED:
            raise DatasetError(
                f"ranks hold parts of {name}, and layout.context is {layout.context!r}, expected "
                f"one of {', '.join(SHARDED)}: state how sequences were cut"
            )
        there = np.zeros(len(response), np.bool_)
        for one, column in pairs:
            there[one.rows] |= _valid(column)
        pieces: list[Piece] = []
        for one, column in pairs:
            rows = one.rows
            where = f"rank {one.part.entry.key.rank}"
            if not np.array_equal(valid := _valid(column), there[rows]):
                sample = self._names[rows[np.argmax(valid != there[rows])]]
                raise DatasetError(
                    f"{where}: {name} of sample {sample!r} is missing, and other ranks have it"
                )
            ids = [self._names[row] for row in rows]
            cut = Cut(where, layout, ids, total[rows], response[rows], one.places)
            pieces.append((column, rows, held_spans(name, column, cut, there[rows])))
        found = whole_lists(pieces, response, there)
        check_tiles(name, found, self._names)
        return found.lists

    def note_difference(self, name: str, report: CohortReport) -> None:
        """Report a rank that does not hold what the first one does, bit by bit."""
        judged = self.table[name].combine_chunks()
        lead = self.shards[0].part.entry.key.rank
        for one in self.shards:
            mine = one.part.table[name].combine_chunks()
            straight = np.array_equal(one.rows, np.arange(len(judged)))
            if _same(mine, judged if straight else judged.take(pa.array(one.rows))):
                continue
            message = (
                f"context-parallel rank {one.part.entry.key.rank} holds another {name} than rank "
                f"{lead}, which is judged"
            )
            stage = STAGE_OF_COLUMN.get(name, "sample")
            report.findings.append(Finding("copy", "error", message, stage=stage))
            return


def _keys(table: pa.Table) -> list[tuple[object, ...]]:
    names = [name for name in _KEY if has_column(table, name)]
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


def _is_whole(column: pa.Array, response: Int64s) -> bool:
    return np.array_equal(lengths_of(column), response * _valid(column))


def _valid(column: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False), np.bool_)


def _same(left: pa.Array, right: pa.Array) -> bool:
    if left.equals(right):
        return True
    kind = left.type
    inner = kind.value_type if pa.types.is_list(kind) else kind
    if not pa.types.is_floating(inner) or not np.array_equal(_valid(left), _valid(right)):
        return False
    flat = [one.flatten() if pa.types.is_list(kind) else one.drop_null() for one in (left, right)]
    bits = [one.to_numpy(zero_copy_only=False).view(f"u{inner.bit_width // 8}") for one in flat]
    return np.array_equal(*bits) and (
        not pa.types.is_list(kind) or np.array_equal(lengths_of(left), lengths_of(right))
    )

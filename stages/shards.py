"""Whole samples out of what the ranks of a context-parallel group hold of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.contracts import STAGE_OF_COLUMN
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.lists import Int64s, lengths_of
from trajreplay.schema.settings import LayoutSettings
from trajreplay.schema.shards import Spans, held_tokens, packed_positions, response_spans
from trajreplay.schema.tables import RESPONSE_LISTS
from trajreplay.stages.report import CohortReport, Finding
from trajreplay.stages.shard_outputs import Part, joined_outputs

_KEY = ("sample_id", "source_attempt", "source_rollout_id")
_OWN = ("rank", "row")


def whole_samples(
    parts: list[Part], layout: LayoutSettings, report: CohortReport | None = None
) -> list[Part]:
    """Put the shards of each context-parallel group together, under the name of its first rank.

    Args:
        parts: The ranks of a capture set, in order.
        layout: How their sequences were cut.
        report: Gets findings of what the ranks of a group hold alike and do not agree on.

    Returns:
        A part for each group; a rank that is alone in its group is one as it is.

    Raises:
        DatasetError: A rank of a group is missing, holds other samples, or other tokens than the
            layout gives it.
    """
    groups: dict[tuple[int, int], list[Part]] = defaultdict(list)
    for part in parts:
        place = part.entry.parallel
        groups[place.data_rank, place.pipeline_rank].append(part)
    return [_joined(group, layout, report) for group in groups.values()]


def _joined(group: list[Part], layout: LayoutSettings, report: CohortReport | None) -> Part:
    size = group[0].entry.parallel.context_size
    if size == 1 and len(group) == 1:
        return group[0]
    group = sorted(group, key=lambda part: part.entry.parallel.context_rank)
    found = [(one.entry.parallel.context_rank, one.entry.parallel.context_size) for one in group]
    if found != [(rank, size) for rank in range(size)]:
        raise DatasetError(
            f"the context-parallel ranks (rank, size) {found} of data rank "
            f"{group[0].entry.parallel.data_rank} are there, expected each of 0 to {size - 1} "
            f"once: capture all of them"
        )
    parts = [_ordered_as(part, group[0]) for part in group]
    joined, sharded = _joined_columns(parts, layout, report)
    outputs = joined_outputs(parts, sharded=sharded, report=report)
    return Part(replace(parts[0].entry, outputs=outputs), joined)


def _ordered_as(part: Part, lead: Part) -> Part:
    """The rows of a part in the order of the leader's."""
    if part is lead:
        return part
    mine, theirs = _keys(part.table), _keys(lead.table)
    if mine == theirs:
        return part
    places = {key: row for row, key in enumerate(mine)}
    other = next(iter(set(mine) ^ set(theirs)), None)
    if other is not None or len(mine) != len(theirs):
        raise DatasetError(
            f"context-parallel ranks {lead.entry.key.rank} and {part.entry.key.rank} do not hold "
            f"the same samples: {other[0] if other else 'one'!r} is on one of them only"
        )
    return Part(part.entry, part.table.take([places[key] for key in theirs]))


def _keys(table: pa.Table) -> list[tuple[object, ...]]:
    names = [name for name in _KEY if name in table.column_names]
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


def _joined_columns(
    parts: list[Part], layout: LayoutSettings, report: CohortReport | None
) -> tuple[pa.Table, bool]:
    table = parts[0].table
    response = np.asarray(table["response_length"].to_numpy(), np.int64)
    total = np.asarray(table["total_length"].to_numpy(), np.int64)
    spans = [
        response_spans(layout, total, response, rank, len(parts)) for rank in range(len(parts))
    ]
    sharded = False
    for index, name in enumerate(table.column_names):
        if name in _OWN:
            continue
        columns = [part.table[name].combine_chunks() for part in parts]
        if name in RESPONSE_LISTS and not _are_whole(columns, response):
            whole = _scattered(name, parts, columns, spans, response)
            table = table.set_column(index, table.schema.field(index), whole)
            sharded = True
        elif report is not None:
            _note_difference(name, parts, columns, report)
    return table, sharded


def _are_whole(columns: list[pa.Array], response: Int64s) -> bool:
    return all(np.array_equal(lengths_of(one), response * _valid(one)) for one in columns)


def _valid(column: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.asarray(column.is_valid().to_numpy(zero_copy_only=False), np.bool_)


def _scattered(
    name: str, parts: list[Part], columns: list[pa.Array], spans: list[Spans], response: Int64s
) -> pa.Array:
    """The values of all ranks, each at the place of its token; rows that none has stay null."""
    there = _valid(columns[0])
    offsets = np.concatenate([[0], np.cumsum(response * there)])
    values = np.empty(offsets[-1], columns[0].type.value_type.to_pandas_dtype())
    hits = np.zeros(offsets[-1], np.int64)
    for part, column, mine in zip(parts, columns, spans, strict=True):
        found, expected = lengths_of(column), held_tokens(mine) * there
        wrong = (found != expected) | (_valid(column) != there)
        if wrong.any():
            row = int(np.argmax(wrong))
            sample_id = parts[0].table["sample_id"][row].as_py()
            raise DatasetError(
                f"rank {part.entry.key.rank}: {name} of sample {sample_id!r} has {found[row]} "
                f"values, expected {expected[row]}, its tokens under the stated layout, or "
                f"response_length = {response[row]} on every rank"
            )
        places = packed_positions([(a * there, b * there) for a, b in mine], offsets)
        values[places] = column.flatten().to_numpy(zero_copy_only=False)
        hits[places] += 1
    if len(wrong := np.flatnonzero(hits != 1)):
        row = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        raise DatasetError(
            f"{name} of sample {parts[0].table['sample_id'][row].as_py()!r}: token "
            f"{wrong[0] - offsets[row]} is held by {hits[wrong[0]]} ranks, expected one: the "
            "shards do not tile the response"
        )
    ends = pa.array(offsets.astype(np.int32))
    absent = None if there.all() else pa.array(~there)
    return pa.ListArray.from_arrays(ends, pa.array(values), type=columns[0].type, mask=absent)


def _note_difference(
    name: str, parts: list[Part], columns: list[pa.Array], report: CohortReport
) -> None:
    """Report a rank that does not hold what the first one does, bit by bit."""
    for part, column in zip(parts[1:], columns[1:], strict=True):
        if _same(column, columns[0]):
            continue
        stage = STAGE_OF_COLUMN.get(name, "sample")
        message = (
            f"context-parallel rank {part.entry.key.rank} holds another {name} than rank "
            f"{parts[0].entry.key.rank}, which is judged"
        )
        report.findings.append(Finding("copy", "error", message, stage=stage))
        return


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

"""Whole samples out of what the ranks of a context-parallel group hold of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pyarrow as pa

from trajreplay.schema.columns import has_column
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.settings import LayoutSettings
from trajreplay.schema.shards import PLACING, row_places
from trajreplay.schema.tables import RESPONSE_LISTS
from trajreplay.stages.cohorts.packed import FORWARD_RANK
from trajreplay.stages.cohorts.shard_group import PLACE, ShardGroup
from trajreplay.stages.cohorts.shard_outputs import Part, joined_outputs
from trajreplay.stages.report import CohortReport

# Columns that a part needs for its rows to be `placed`.
PLACED_BY = ("response_length", "total_length", *PLACING.values())
_OWN = ("rank", "row", "context_rank", "context_size", *PLACE)


def placed(part: Part, layout: LayoutSettings) -> Part:
    """A part whose rows know where their shards lie, before any of them is left out."""
    table = part.table
    there = {
        key: table[name].to_pylist() for key, name in PLACING.items() if has_column(table, name)
    }
    total = np.asarray(table["total_length"].to_numpy(), np.int64)
    places = row_places(
        layout, part.entry.parallel, total, **there, where=f"rank {part.entry.key.rank}"
    )
    for name, values in zip(PLACE, places, strict=True):
        table = table.append_column(name, pa.array(values))
    return Part(part.entry, table)


def is_dynamic(tables: list[pa.Table]) -> bool:
    """Whether rows say themselves which shard of their sample they are."""
    return any(has_column(table, "context_size") for table in tables)


def is_sharded(parts: list[Part]) -> bool:
    """Whether a rank of a capture set may hold parts of its samples only."""
    several = any(part.entry.parallel.context_size > 1 for part in parts)
    return several or is_dynamic([part.table for part in parts])


def whole_samples(
    parts: list[Part], layout: LayoutSettings, report: CohortReport | None = None
) -> list[Part]:
    """Put the shards of samples together, under the name of the first rank of their group.

    The ranks of a group are those of one data-parallel rank; where rows say themselves which shard
    they are, any rank may hold one, and all ranks are one group.

    Args:
        parts: The ranks of a capture set, in order, `placed`.
        layout: How their sequences were cut.
        report: Gets findings of what the ranks of a group hold alike and do not agree on.

    Returns:
        A part for each group; a rank that is alone in its group is one as it is.

    Raises:
        DatasetError: A rank of a group is missing, holds other samples, or other tokens than the
            layout gives it.
    """
    groups: dict[tuple[int, int], list[Part]] = defaultdict(list)
    dynamic = is_dynamic([part.table for part in parts])
    for part in parts:
        place = part.entry.parallel
        groups[0 if dynamic else place.data_rank, place.pipeline_rank].append(part)
    return [_joined(group, layout, report, dynamic) for group in groups.values()]


def _joined(
    parts: list[Part], layout: LayoutSettings, report: CohortReport | None, dynamic: bool
) -> Part:
    if not dynamic:
        parts = sorted(parts, key=lambda part: part.entry.parallel.context_rank)
        _check_ranks(parts)
    group = ShardGroup(parts)
    group.check()
    if len(parts) == 1 and not bool((group.shards[0].places.size > 1).any()):
        return Part(parts[0].entry, parts[0].table.drop_columns(list(PLACE)))
    table, sharded = group.table, False
    for index, name in enumerate(table.column_names):
        if name in _OWN:
            continue
        whole = group.scattered(name, layout) if name in RESPONSE_LISTS else None
        if whole is not None:
            table = table.set_column(index, table.schema.field(index), whole)
            sharded = True
        elif report is not None:
            group.note_difference(name, report)
    lead = parts[0].entry
    if dynamic:
        table = _renamed(table, lead.key.rank)
        table = table.append_column(FORWARD_RANK, pa.array(group.first_ranks))
    rows = [(part, one.rows) for part, one in zip(parts, group.shards, strict=True)]
    outputs = joined_outputs(rows, whole=table, sharded=sharded, dynamic=dynamic, report=report)
    return Part(replace(lead, outputs=outputs), table.drop_columns(list(PLACE)))


def _renamed(table: pa.Table, rank: int) -> pa.Table:
    """Samples of several ranks as the rows of one."""
    count = table.num_rows
    for name, values in (("rank", np.full(count, rank, np.int32)), ("row", np.arange(count))):
        if has_column(table, name):
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
    return table


def _check_ranks(parts: list[Part]) -> None:
    size = parts[0].entry.parallel.context_size
    found = [(one.entry.parallel.context_rank, one.entry.parallel.context_size) for one in parts]
    if found != [(rank, size) for rank in range(size)]:
        raise DatasetError(
            f"the context-parallel ranks (rank, size) {found} of data rank "
            f"{parts[0].entry.parallel.data_rank} are there, expected each of 0 to {size - 1} "
            f"once: capture all of them"
        )

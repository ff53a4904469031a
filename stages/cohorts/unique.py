"""Samples that are there twice: in one shard, which is refused, and on two ranks, which is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.schema.columns import has_column
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.stages.report import CohortReport, Finding, Severity

SAMPLE_KEY = ("sample_id", "source_attempt", "source_rollout_id")


def check_unique(parts: Sequence[tuple[Entry, pa.Table]]) -> None:
    """Refuse a sample that a shard holds twice, in one capture or in two.

    Args:
        parts: The captures of a cohort, each with its samples.

    Raises:
        DatasetError: It does; sample ids are unique within the rollout that generated them.
    """
    shards: dict[object, list[tuple[Entry, pa.Table]]] = {}
    for part in parts:
        shards.setdefault(part[0].parallel.shard, []).append(part)
    for mine in shards.values():
        chunks = [chunk for _, rows in mine for chunk in rows["sample_id"].chunks]
        names = pa.chunked_array(chunks, pa.string())
        if len(pc.unique(names)) != len(names):
            _refuse_twice(mine)


def _refuse_twice(parts: list[tuple[Entry, pa.Table]]) -> None:
    """Refuse a sample that is there twice, unless two rollouts gave two samples one name."""
    before: set[Any] = set()
    for entry, rows in parts:
        there = set(rows.column_names)
        columns = (rows[name].to_pylist() for name in SAMPLE_KEY if name in there)
        mine = list(zip(*columns, strict=True))
        distinct = set(mine)
        if len(distinct) != len(mine) or not before.isdisjoint(distinct):
            twice = [one for one, count in Counter(mine).items() if count > 1 or one in before]
            raise DatasetError(
                f"{entry.key}: {len(twice)} samples are there twice, first {twice[0][0]!r}; sample "
                "ids are unique within a rollout, and a parallel copy states its tensor and "
                "pipeline rank, or owner=False"
            )
        before |= distinct


def note_doubled(parts: Sequence[tuple[Entry, pa.Table]], report: CohortReport) -> None:
    """Say which samples lie on several data-parallel ranks, and count once on each.

    A rank that holds what another one holds, and nothing else, is a copy that counts twice. Single
    samples may be repeated to fill a batch, and are a warning.

    Args:
        parts: The captures that own the samples of a cohort, each with its samples, in which no
            shard holds one twice.
        report: Gets the findings.
    """
    if any(has_column(rows, "context_size") for _, rows in parts):
        return  # rows are shards of samples, which lie on any ranks
    by_rank: dict[int, tuple[Entry, list[pa.Table]]] = {}
    for entry, rows in parts:
        # The shards of one data-parallel rank hold the same samples: those of the first tell.
        lead, held = by_rank.setdefault(entry.parallel.data_rank, (entry, []))
        if lead.parallel.context_rank == entry.parallel.context_rank:
            held.append(rows)
    if len(by_rank) < 2:
        return
    chunks = [chunk for _, held in by_rank.values() for rows in held for chunk in _names(rows)]
    names = pa.chunked_array(chunks, pa.string())
    if len(pc.unique(names)) == len(names):
        return
    keys = [(lead.key.rank, _keys(held)) for lead, held in by_rank.values()]
    seen: dict[Any, int] = {}
    twice: dict[Any, tuple[int, int]] = {}
    for at, (rank, mine) in enumerate(keys):
        copied = next((other for other, its in keys[:at] if mine and mine == its), None)
        if copied is not None:
            message = (
                f"rank {rank} holds the samples of rank {copied}, {len(mine)} of them: a copy "
                "that counts twice; state its tensor rank or owner=False, or shard the data"
            )
            _add(report, "rank.doubled", "error", message, min(mine)[0])
            continue
        twice |= {one: (seen[one], rank) for one in mine if one in seen}
        seen |= dict.fromkeys(mine, rank)
    if twice:
        first = min(twice)
        message = (
            f"{len(twice)} samples are on two data-parallel ranks, and count on each, here on "
            f"{twice[first][0]} and {twice[first][1]}: repeated to fill a batch, or handed out "
            "twice"
        )
        _add(report, "sample.duplicated", "warning", message, first[0])


def _names(rows: pa.Table) -> list[pa.Array]:
    return list(rows["sample_id"].chunks)


def _keys(held: list[pa.Table]) -> set[tuple[Any, ...]]:
    """The samples of some tables, by name and the rollout that generated them."""
    found: set[tuple[Any, ...]] = set()
    for rows in held:
        there = set(rows.column_names)
        columns = (rows[name].to_pylist() for name in SAMPLE_KEY if name in there)
        found |= set(zip(*columns, strict=True))
    return found


def _add(report: CohortReport, check: str, severity: Severity, message: str, sample: str) -> None:
    report.findings.append(Finding(check, severity, message, stage="sample", sample_id=sample))

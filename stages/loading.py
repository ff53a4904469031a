"""From a capture set to samples in memory: what can be recomputed, and the columns for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.query.capture_sets import CaptureSet
from trajreplay.query.reading import read_columns
from trajreplay.query.row_masks import Mask
from trajreplay.schema.columns import Table
from trajreplay.schema.contracts import STAGE_NAMES, V1_STAGES, StageContract
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError, TrajReplayError
from trajreplay.schema.store import Store
from trajreplay.schema.tables import SAMPLE_TABLES
from trajreplay.stages.block import LoadedCohort
from trajreplay.stages.capability import Ability, ability
from trajreplay.stages.checks import (
    check_agreement,
    check_groups,
    check_lengths,
    check_memory,
    check_missing,
    check_sources,
    check_unique,
)
from trajreplay.stages.notes import (
    held_dtypes,
    note_copies,
    note_non_finite,
    note_tolerances,
    note_unread_outputs,
)
from trajreplay.stages.report import CohortReport, Finding, StageResult
from trajreplay.stages.sources import TWINS, Source, Sources, fill_from_sources

_ALWAYS = (
    "sample_id",
    "group_id",
    "response_length",
    "total_length",
    "loss_mask",
)
_OF_STEPS = ("source_attempt", "source_rollout_id")
_OPTIONAL = ("returns",)


@dataclass(frozen=True)
class Task:
    """One capture set to replay, and which of its rows.

    Args:
        captures: The capture set.
        rows: By rank, which rows; None for all.
        whole: Whether those are the whole cohort.
        problems: Why it cannot be replayed.
    """

    captures: CaptureSet
    rows: dict[int, Mask] | None = None
    whole: bool = True
    problems: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Response tokens of its captures."""
        return sum(entry.tokens for entry in self.captures.entries)

    @property
    def turn(self) -> tuple[str, int, int, int]:
        """When it is judged: after every rollout that it consumed from."""
        sources = [one[1] for entry in self.captures.entries for one in entry.sources]
        latest = max([self.captures.rollout_id, *sources])
        step = -1 if self.captures.step_id is None else self.captures.step_id
        return self.captures.run_id, latest, step, self.captures.attempt


def load_cohort(
    store: Store,
    task: Task,
    sources: Sources,
    *,
    stages: Collection[str] = (),
    allow_partial: bool = False,
    memory_bytes: int = 2 << 30,
) -> LoadedCohort | CohortReport:
    """Read what the stages of one capture set need.

    Args:
        store: The lake.
        task: The capture set and its rows.
        sources: The rollouts that steps consumed from.
        stages: Stages asked for; all declared ones if empty.
        allow_partial: Whether to replay what is there of an incomplete capture set.
        memory_bytes: What the samples may take in memory.

    Returns:
        The loaded cohort, or a report that says why the cohort is refused or has nothing to run.
    """
    captures = task.captures
    report = CohortReport(
        captures.run_id,
        captures.attempt,
        captures.rollout_id,
        captures.step_id,
        list(captures.ranks),
    )
    try:
        refusals = (*captures.refusals(allow_partial=allow_partial), *task.problems)
        if refusals:
            raise DatasetError("; ".join(refusals))
        if captures.gaps:
            report.partial = True
            for gap in captures.gaps:
                report.findings.append(Finding("completeness", "warning", gap))
        return _load(store, task, sources, report, stages, memory_bytes)
    except TrajReplayError as error:
        report.refusal = error.message
        report.findings.append(Finding("refused", "error", error.message))
        return report


def _load(
    store: Store,
    task: Task,
    sources: Sources,
    report: CohortReport,
    asked: Collection[str],
    memory_bytes: int,
) -> LoadedCohort | CohortReport:
    captures = task.captures
    owners = list(captures.owners)
    lead = owners[0] if owners else None
    if lead is None:
        raise DatasetError(f"{captures.cohort}: no captured rank owns its samples")
    check_agreement(list(captures.entries))
    table = SAMPLE_TABLES[captures.kind]
    held = _held_columns(owners, table.name)
    abilities = _choose_stages(owners, report, asked, held)
    if not abilities:
        if not lead.contracts:
            message = "no stage was declared: give stages=[...] to Lake.capture"
            report.findings.append(Finding("nothing-declared", "warning", message))
        return report
    reads = {name for one in abilities.values() for name in one.reads}
    writes = {name for one in abilities.values() for name in one.writes if name in table}
    names = [*_ALWAYS, *(_OF_STEPS if captures.kind == "step" else ())]
    has_source = (
        captures.kind == "step" and "sample" in abilities and _any_source(captures, sources)
    )
    twins = TWINS if has_source else ()
    optional = [*_OPTIONAL, *twins] if "advantage.estimate" in abilities else twins
    sizes = ("group_size",) if "reward.post_process" in abilities else ()
    batches = ("micro_batch_id",) if _per_micro_batch(owners) else ()
    odd = _unread_non_finite(owners, table, {*names, *reads, *writes, *optional})
    wanted = dict.fromkeys([*names, *batches, *sorted(reads | writes), *optional, *sizes, *odd])
    read = [name for name in wanted if name in (*names, *batches) or name in held]
    check_memory(owners, table, read, memory_bytes)
    merged, totals, micro_batches = _read_rows(store, owners, table, read, task.rows)
    for copy in captures.copies:
        read_columns(store, copy, table, read)  # a copy counts as whole only if its file is
    merged = fill_from_sources(merged, reads, report.run_id, sources)
    check_lengths(merged)
    nulls = {name: merged[name].null_count for name in merged.column_names}
    check_missing(nulls, merged.num_rows, abilities, report)
    expected = lead.settings.reward.n_samples_per_prompt
    check_groups(merged, abilities, report, sources, expected)
    cohort = LoadedCohort(
        report=report,
        settings=lead.settings,
        owners=owners,
        table=merged,
        rows=totals,
        stages=[name for name in STAGE_NAMES if name in abilities],
        whole=task.whole,
        lacking=tuple(name for name, count in nulls.items() if count),
        dtypes=held_dtypes(owners, merged, report),
        micro_batches=micro_batches,
    )
    if captures.kind == "step" and not has_source and _any_source(captures, sources):
        message = "handoffs are not compared: the step does not declare the stage sample"
        report.findings.append(Finding("handoff", "warning", message))
    note_non_finite(cohort, odd)
    note_copies(captures, report)
    note_unread_outputs(cohort)
    note_tolerances(cohort)
    return cohort


def _read_rows(
    store: Store,
    owners: list[Entry],
    table: Table,
    columns: list[str],
    rows: Mapping[int, Mask] | None,
) -> tuple[pa.Table, dict[int, int], dict[tuple[int, str | None], int]]:
    """The chosen rows of all owners, and how many each rank and micro-batch holds in all."""
    tables, totals, micro_batches = [], {}, Counter[tuple[int, str | None]]()
    seen: dict[object, set[Any]] = {}
    for entry in owners:
        rank = entry.key.rank
        part = read_columns(store, entry, table, columns)
        totals[rank] = part.num_rows
        check_unique(entry, part, seen)
        check_sources(entry, part)
        if "micro_batch_id" in columns:
            micro_batches.update((rank, one) for one in part["micro_batch_id"].to_pylist())
        elif part.num_rows:
            micro_batches[rank, None] = part.num_rows
        part = part.append_column("rank", pa.array(np.full(part.num_rows, rank, np.int32)))
        part = part.append_column("row", pa.array(np.arange(part.num_rows, dtype=np.int64)))
        tables.append(chosen_rows(part, rows, rank))
    merged = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    return merged, totals, dict(micro_batches)


def _unread_non_finite(owners: list[Entry], table: Table, read: set[str]) -> list[str]:
    """Columns that no stage reads and that hold NaN or infinities, as their seals count them."""
    found = {
        name
        for entry in owners
        if (file := entry.file(table.name)) is not None
        for name, seal in file.columns.items()
        if seal.non_finite and name in table and table[name].is_floating and name not in read
    }
    return sorted(found)


def _per_micro_batch(owners: list[Entry]) -> bool:
    return any(one.scope == "micro_batch" for entry in owners for one in entry.outputs)


def chosen_rows(part: pa.Table, rows: Mapping[int, Mask] | None, rank: int) -> pa.Table:
    """The rows of one rank that a task asks for."""
    if rows is None:
        return part
    if rank not in rows:
        return part.slice(0, 0)
    return part if rows[rank] is None else part.filter(rows[rank])


def _held_columns(owners: list[Entry], table: str) -> set[str]:
    """Columns that a file of some rank with rows has."""
    return {
        name for entry in owners if (file := entry.file(table)) is not None for name in file.columns
    }


def _choose_stages(
    owners: list[Entry], report: CohortReport, asked: Collection[str], held: set[str]
) -> dict[str, Ability]:
    """The stages to run; the others get their result here.

    A stage that is declared recompute, or asked for, and unsupported is refused; the others run.
    """
    chosen: dict[str, Ability] = {}
    lead = owners[0]
    widest = max((entry.parallel for entry in owners), key=lambda one: one.context_size)
    for name in STAGE_NAMES:
        contract = lead.contracts.get(name)
        if asked and name not in asked:
            continue
        if contract is None:
            if asked or name in V1_STAGES:
                report.stages.append(StageResult(name, "not-declared", capability="not-declared"))
        elif asked and contract.capability == "unsupported":
            message = f"asked for and declared unsupported: {contract.reason}"
            report.stages.append(StageResult(name, "refused", "unsupported", message=message))
        elif contract.capability != "recompute":
            report.stages.append(_not_run(contract))
        else:
            found = ability(name, lead.settings, widest, held)
            if found.capability == "recompute":
                chosen[name] = found
                continue
            message = f"declared recompute and unsupported: {found.reason}"
            report.stages.append(StageResult(name, "refused", "unsupported", message=message))
    return chosen


def _not_run(contract: StageContract) -> StageResult:
    return StageResult(
        contract.stage,
        contract.capability,  # type: ignore[arg-type]
        capability=contract.capability,
        version=contract.version,
        message=contract.reason,
    )


def _any_source(captures: CaptureSet, sources: Sources) -> bool:
    return any(
        isinstance(sources.find(captures.run_id, attempt, rollout_id), Source)
        for entry in captures.owners
        for attempt, rollout_id in entry.sources
    )

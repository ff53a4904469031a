"""From a capture set to samples in memory: what can be recomputed, and the columns for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from trajreplay.query.files.reading import read_columns
from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.query.selecting.row_masks import Mask
from trajreplay.schema.columns import Table
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError, TrajReplayError
from trajreplay.schema.store import Store
from trajreplay.schema.tables import SAMPLE_TABLES
from trajreplay.stages.cohorts.checks import (
    check_agreement,
    check_components,
    check_lengths,
    check_memory,
    check_missing,
    check_sources,
    check_whole,
)
from trajreplay.stages.cohorts.cohort import LoadedCohort, has_own_ids
from trajreplay.stages.cohorts.ledger import check_ledger
from trajreplay.stages.cohorts.members import counted_members
from trajreplay.stages.cohorts.membership import check_groups
from trajreplay.stages.cohorts.not_finite import harmful_columns
from trajreplay.stages.cohorts.notes import (
    held_dtypes,
    note_copies,
    note_non_finite,
    note_not_read,
    note_tolerances,
    note_unproven,
    note_unread_outputs,
)
from trajreplay.stages.cohorts.packed import numbered
from trajreplay.stages.cohorts.shard_outputs import Part
from trajreplay.stages.cohorts.shards import is_dynamic, is_sharded, placed, whole_samples
from trajreplay.stages.cohorts.sources import NoSources, Source, Sources, fill_from_sources
from trajreplay.stages.cohorts.staleness import note_staleness
from trajreplay.stages.cohorts.unique import check_unique, note_doubled
from trajreplay.stages.replaying.batches import check_batches
from trajreplay.stages.replaying.recipe import Recipes
from trajreplay.stages.report import CohortReport, Finding


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
    recipes: Recipes,
    *,
    allow_partial: bool = False,
    memory_bytes: int = 2 << 30,
) -> LoadedCohort | CohortReport:
    """Read what the stages of one capture set need.

    Args:
        store: The lake.
        task: The capture set and its rows.
        sources: The rollouts that steps consumed from.
        recipes: What is done with which capture sets.
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
        return _load(store, task, sources, recipes, report, memory_bytes)
    except TrajReplayError as error:
        report.refusal = error.message
        report.findings.append(Finding("refused", "error", error.message))
        return report


def _load(
    store: Store,
    task: Task,
    sources: Sources,
    recipes: Recipes,
    report: CohortReport,
    memory_bytes: int,
) -> LoadedCohort | CohortReport:
    captures = task.captures
    owners = list(captures.owners)
    lead = owners[0] if owners else None
    if lead is None:
        raise DatasetError(f"{captures.cohort}: no captured rank owns its samples")
    check_agreement(list(captures.entries))
    note_unproven(owners, report)
    if has_own_ids(owners):
        sources = NoSources()
    table = SAMPLE_TABLES[captures.kind]
    given = _given(captures, sources) if captures.kind == "step" else None
    has_source = given is not None
    recipe = recipes.of(captures, given)
    report.stages += recipe.not_run()
    if not recipe.abilities:
        if not lead.contracts:
            message = "no stage was declared: give stages=[...] to Lake.capture"
            report.findings.append(Finding("nothing-declared", "warning", message))
        return report
    abilities, read = dict(recipe.abilities), recipe.columns
    check_memory(owners, table, read, memory_bytes)
    rows = _read_rows(store, owners, table, read, task.rows, report)
    merged = rows.table
    for copy in captures.copies:
        read_columns(store, copy, table, read)  # a copy counts as whole only if its file is
    nulls = _nulls(merged)
    filled = fill_from_sources(merged, nulls, recipe.reads, report.run_id, sources)
    if filled is not merged:
        merged, nulls = filled, _nulls(filled)
    check_lengths(merged)
    check_components(merged, lead.settings.reward)
    check_missing(nulls, merged.num_rows, abilities, report)
    expected = lead.settings.reward.n_samples_per_prompt
    check_groups(merged, abilities, report, sources, expected)
    if not task.whole or report.partial:
        check_whole(abilities, report)
    others = check_batches(merged, abilities, lead.settings, report, sources)
    cohort = LoadedCohort(
        report=report,
        settings=lead.settings,
        owners=rows.owners,
        table=merged,
        rows=rows.totals,
        abilities=abilities,
        whole=task.whole,
        lacking=tuple(name for name, count in nulls.items() if count),
        finite=recipe.finite,
        dtypes=held_dtypes(owners, merged, report),
        micro_batches=rows.micro_batches,
        others=others,
    )
    if has_source and "sample" not in recipe.abilities:
        message = "handoffs are not compared: the step does not declare the stage sample"
        report.findings.append(Finding("handoff", "warning", message))
    # What some samples lack is left to no stage.
    harmful = harmful_columns(table, cohort.settings)
    short = [one for one in harmful if one in cohort.lacking and one not in recipe.finite]
    note_non_finite(cohort, list(dict.fromkeys([*recipe.unread, *short])))
    note_not_read(cohort, recipe.not_read)
    note_copies(captures, report)
    note_unread_outputs(cohort)
    note_tolerances(cohort)
    note_staleness(cohort)
    if captures.kind == "rollout" and "sample" in abilities and task.whole and not report.partial:
        check_ledger(cohort, sources)
    return cohort


def _nulls(table: pa.Table) -> dict[str, int]:
    counts = [column.null_count for column in table.columns]
    return dict(zip(table.schema.names, counts, strict=True))


@dataclass(frozen=True)
class _Rows:
    """The chosen rows of a capture set, the entries that they go by, and what each holds in all."""

    table: pa.Table
    owners: list[Entry]
    totals: dict[int, int]
    micro_batches: dict[tuple[int, str | None], int]


def _read_rows(
    store: Store,
    owners: list[Entry],
    table: Table,
    columns: Sequence[str],
    rows: Mapping[int, Mask] | None,
    report: CohortReport,
) -> _Rows:
    parts: list[Part] = []
    held: list[tuple[int, pa.Table]] = []
    read = [(entry, read_columns(store, entry, table, columns)) for entry in owners]
    check_unique(read)
    note_doubled(read, report)
    for entry, part in read:
        rank = entry.key.rank
        check_sources(entry, part)
        if entry.parallel.context_rank == 0 or is_dynamic([part]):
            held.append((rank, part))  # the others of its group hold the same samples
        parts.append(Part(entry, numbered(part, rank)))
    layout, sharded = owners[0].settings.layout, is_sharded(parts)
    if sharded:
        parts = [placed(part, layout) for part in parts]
    parts = [replace(one, table=chosen_rows(one.table, rows, one.entry.key.rank)) for one in parts]
    if sharded:
        parts = whole_samples(parts, layout, report)
    tables = [part.table for part in parts]
    merged = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    members = counted_members(held, parts[0].entry, "micro_batch_id" in columns)
    return _Rows(merged, [part.entry for part in parts], *members)


def chosen_rows(part: pa.Table, rows: Mapping[int, Mask] | None, rank: int) -> pa.Table:
    """The rows of one rank that a task asks for."""
    if rows is None:
        return part
    if rank not in rows:
        return part.slice(0, 0)
    return part if rows[rank] is None else part.filter(rows[rank])


def _given(captures: CaptureSet, sources: Sources) -> frozenset[str] | None:
    """The columns that a step can be given by all its rollouts; None if none of them is there."""
    places = {one for entry in captures.owners for one in entry.sources}
    found = [sources.find(captures.run_id, *place) for place in sorted(places)]
    there = [one for one in found if isinstance(one, Source)]
    if not there:
        return None
    if len(there) < len(found):
        return frozenset()
    return frozenset.intersection(*(frozenset(one.table.column_names) for one in there))

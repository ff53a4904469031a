"""From a capture set to samples in memory: what can be recomputed, and the columns for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.query.capture_sets import CaptureSet
from trajreplay.query.reading import read_columns
from trajreplay.schema.contracts import STAGE_NAMES, STAGE_OF_COLUMN, StageContract
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError, SchemaError, TrajReplayError, listed
from trajreplay.schema.store import LocalStore
from trajreplay.schema.tables import SAMPLE_TABLES
from trajreplay.stages.block import LoadedCohort
from trajreplay.stages.capability import Ability, ability
from trajreplay.stages.packed import list_lengths
from trajreplay.stages.report import CohortReport, Finding, StageResult
from trajreplay.stages.sources import TWINS, Source, Sources

_ALWAYS = (
    "sample_id",
    "group_id",
    "micro_batch_id",
    "response_length",
    "total_length",
    "loss_mask",
)
_OF_STEPS = ("source_attempt", "source_rollout_id")
_OPTIONAL = ("returns",)


def load_cohort(
    store: LocalStore,
    captures: CaptureSet,
    sources: Sources,
    *,
    stages: Collection[str] = (),
    rows: Mapping[int, np.ndarray[Any, Any]] | None = None,
    whole: bool = True,
    allow_partial: bool = False,
) -> LoadedCohort | CohortReport:
    """Read what the stages of one capture set need.

    Args:
        store: The lake.
        captures: The capture set.
        sources: The rollouts that steps consumed from.
        stages: Stages asked for; all declared ones if empty.
        rows: By rank, which rows to replay; all rows if None.
        whole: Whether those rows are the whole cohort.
        allow_partial: Whether to replay what is there of an incomplete capture set.

    Returns:
        The loaded cohort, or a report that says why the cohort is refused or has nothing to run.
    """
    report = CohortReport(
        captures.run_id,
        captures.attempt,
        captures.rollout_id,
        captures.step_id,
        list(captures.ranks),
    )
    try:
        refusals = captures.refusals(allow_partial=allow_partial)
        if refusals:
            raise DatasetError("; ".join(refusals))
        if captures.gaps:
            report.partial = True
            for gap in captures.gaps:
                report.findings.append(Finding("completeness", "warning", gap))
        return _load(store, captures, sources, report, stages, rows, whole)
    except TrajReplayError as error:
        report.refusal = error.message
        report.findings.append(Finding("refused", "error", error.message))
        return report


def _load(
    store: LocalStore,
    captures: CaptureSet,
    sources: Sources,
    report: CohortReport,
    asked: Collection[str],
    rows: Mapping[int, np.ndarray[Any, Any]] | None,
    whole: bool,
) -> LoadedCohort | CohortReport:
    owners = list(captures.owners)
    lead = owners[0] if owners else None
    if lead is None:
        raise DatasetError(f"{captures.cohort}: no captured rank owns its samples")
    _check_agreement(owners)
    table = SAMPLE_TABLES[captures.kind]
    held = _held_columns(owners, table.name)
    abilities = _choose_stages(lead, report, asked, held)
    if not abilities:
        return report
    reads = {name for one in abilities.values() for name in one.reads}
    writes = {name for one in abilities.values() for name in one.writes if name in table}
    names = [*_ALWAYS, *(_OF_STEPS if captures.kind == "step" else ())]
    has_source = (
        captures.kind == "step" and "sample" in abilities and _any_source(captures, sources)
    )
    twins = TWINS if has_source else ()
    optional = [*_OPTIONAL, *twins] if "advantage.estimate" in abilities else twins
    wanted = dict.fromkeys([*names, *sorted(reads | writes), *optional])
    tables, totals, micro_batches = [], {}, Counter[tuple[int, str | None]]()
    for entry in owners:
        rank = entry.key.rank
        read = [name for name in wanted if name in _ALWAYS or name in names or name in held]
        part = read_columns(store, entry, table, read)
        totals[rank] = part.num_rows
        micro_batches.update((rank, one) for one in part["micro_batch_id"].to_pylist())
        part = part.append_column("rank", pa.array(np.full(part.num_rows, rank, np.int32)))
        part = part.append_column("row", pa.array(np.arange(part.num_rows, dtype=np.int64)))
        chosen = None if rows is None else rows.get(rank, np.zeros(part.num_rows, bool))
        tables.append(part if chosen is None else part.filter(pa.array(chosen)))
    merged = pa.concat_tables(tables)
    merged = _complete(merged, reads, report.run_id, sources)
    _check_lengths(merged)
    _check_missing(merged, abilities, report, held)
    merged = _drop_null_columns(merged, keep=(*names, "group_id", "micro_batch_id"))
    cohort = LoadedCohort(
        report=report,
        settings=lead.settings,
        owners=owners,
        table=merged,
        rows=totals,
        stages=[name for name in STAGE_NAMES if name in abilities],
        whole=whole,
        dtypes=_dtypes(owners, table.name),
        micro_batches=dict(micro_batches),
    )
    _note_copies(captures, report)
    _note_tolerances(cohort)
    return cohort


def _check_agreement(owners: list[Entry]) -> None:
    for entry in owners[1:]:
        for name in ("settings_tree", "contracts"):
            if getattr(entry, name) != getattr(owners[0], name):
                raise DatasetError(
                    f"ranks {owners[0].key.rank} and {entry.key.rank} disagree on their "
                    f"{name.removesuffix('_tree')}: the ranks of a capture set share one arithmetic"
                )


def _held_columns(owners: list[Entry], table: str) -> set[str]:
    """Columns that a file of some rank with rows has."""
    return {
        name for entry in owners if (file := entry.file(table)) is not None for name in file.columns
    }


def _choose_stages(
    lead: Entry, report: CohortReport, asked: Collection[str], held: set[str]
) -> dict[str, Ability]:
    """The stages to run; the others get their result here.

    Raises:
        SchemaError: A stage that is declared recompute is unsupported.
    """
    chosen: dict[str, Ability] = {}
    for name in STAGE_NAMES:
        contract = lead.contracts.get(name)
        if asked and name not in asked:
            continue
        if contract is None:
            report.stages.append(StageResult(name, "not-declared", capability="not-declared"))
        elif contract.capability != "recompute":
            report.stages.append(_not_run(contract))
        else:
            found = ability(name, lead.settings, lead.parallel, held)
            if found.capability != "recompute":
                raise SchemaError(
                    f"{name} is declared recompute and is unsupported: {found.reason}"
                )
            chosen[name] = found
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


def _complete(table: pa.Table, reads: set[str], run_id: str, sources: Sources) -> pa.Table:
    """Add columns that the step's capture lacks from the rollouts that it consumed from."""
    if "source_rollout_id" not in table.column_names:
        return table
    for name in sorted(reads):
        missing = name not in table.column_names or table[name].null_count == table.num_rows
        if not missing or name not in TWINS or not table.num_rows:
            continue
        column = _from_sources(table, name, run_id, sources)
        if column is not None:
            if name in table.column_names:
                table = table.drop_columns([name])
            table = table.append_column(name, column)
    return table


def _from_sources(
    table: pa.Table, name: str, run_id: str, sources: Sources
) -> pa.ChunkedArray | None:
    coordinates = list(
        zip(
            table["source_attempt"].to_pylist(),
            table["source_rollout_id"].to_pylist(),
            strict=True,
        )
    )
    columns, order = [], []
    for attempt, rollout_id in sorted(set(coordinates)):
        source = sources.find(run_id, attempt, rollout_id)
        mine = np.array([at for at, one in enumerate(coordinates) if one == (attempt, rollout_id)])
        if isinstance(source, str) or name not in source.table.column_names:
            return None
        theirs = source.rows_of(table["sample_id"].take(pa.array(mine)))
        if (theirs < 0).any():
            return None
        columns.append(source.table[name].take(pa.array(theirs)).combine_chunks())
        order.append(mine)
    back = np.argsort(np.concatenate(order), kind="stable")
    joined = pa.chunked_array([chunk for one in columns for chunk in _chunks(one)])
    return joined.take(pa.array(back))


def _chunks(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return list(column.chunks) if isinstance(column, pa.ChunkedArray) else [column]


def _check_lengths(table: pa.Table) -> None:
    """Refuse a response column that is not as long as its sample says."""
    expected = np.asarray(table["response_length"].to_numpy(), np.int64)
    problems = [
        f"sample {table['sample_id'][row].as_py()!r} (rank {table['rank'][row].as_py()}): "
        f"response_length is {expected[row]}, expected 0 or more"
        for row in (expected < 0).nonzero()[0].tolist()
    ]
    for name in table.column_names:
        if not pa.types.is_list(table.schema.field(name).type) or name in (
            "tokens",
            "weight_versions",
        ):
            continue
        found = list_lengths(table[name])
        problems += [
            f"sample {table['sample_id'][row].as_py()!r} (rank {table['rank'][row].as_py()}): "
            f"{name} has {found[row]} values, expected response_length = {expected[row]}"
            for row in ((found != expected) & (found >= 0)).nonzero()[0].tolist()
        ]
    if problems:
        raise DatasetError(listed(problems))


def _check_missing(
    table: pa.Table, abilities: dict[str, Ability], report: CohortReport, held: set[str]
) -> None:
    """Refuse a stage whose input is missing, and leave out one whose recorded output is."""
    for stage, needs in list(abilities.items()):
        for name in needs.reads:
            nulls = table[name].null_count if name in table.column_names else table.num_rows
            if nulls:
                where = "of its samples" if nulls < table.num_rows else "samples"
                raise DatasetError(
                    f"{stage} is declared recompute and its input {name} is missing for {nulls} "
                    f"of {table.num_rows} {where}; capture {name}, or do not declare {stage}"
                )
        columns = [name for name in needs.writes if name in SAMPLE_TABLES["step"]]
        for name in columns:
            nulls = table[name].null_count if name in table.column_names else table.num_rows
            if nulls and stage in abilities:
                message = (
                    f"recorded output {name} is missing for {nulls} of {table.num_rows} samples"
                )
                report.stages.append(StageResult(stage, "unverified", message=message))
                del abilities[stage]


def _drop_null_columns(table: pa.Table, keep: Collection[str]) -> pa.Table:
    empty = [
        name
        for name in table.column_names
        if name not in keep and table.num_rows and table[name].null_count
    ]
    return table.drop_columns(empty) if empty else table


def _dtypes(owners: list[Entry], table: str) -> dict[str, str]:
    """The coarsest dtype in which a producer held each column."""
    precision = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}
    found: dict[str, str] = {}
    for entry in owners:
        file = entry.file(table)
        for name, seal in file.columns.items() if file is not None else ():
            dtype = seal.source_dtype or ""
            if precision.get(dtype, -1) > precision.get(found.get(name, ""), -1):
                found[name] = dtype
    return found


def _note_copies(captures: CaptureSet, report: CohortReport) -> None:
    for one in captures.copy_differences:
        stage = next(
            (STAGE_OF_COLUMN[name] for name in one.columns if name in STAGE_OF_COLUMN), "sample"
        )
        report.findings.append(Finding("copy", "error", str(one), stage=stage))


def _note_tolerances(cohort: LoadedCohort) -> None:
    for entry in cohort.owners:
        for stage, own in entry.tolerances.items():
            policy = cohort.tolerance(stage)
            if own.loosens(policy):
                cohort.report.findings.append(
                    Finding(
                        "tolerance",
                        "warning",
                        f"rank {entry.key.rank} asks for atol {own.atol:g}, rtol {own.rtol:g} at "
                        f"{stage}, looser than the policy; judged by atol {policy.atol:g}, "
                        f"rtol {policy.rtol:g}",
                        stage=stage,
                    )
                )

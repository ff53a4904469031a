"""What a lake holds, at a glance: one row a capture set, and everything known of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trajreplay.query.files.reading import read_columns
from trajreplay.query.manifest.capture_sets import read_capture_set
from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.query.manifest.lineage import Lineage, lineages
from trajreplay.schema.columns import list_of
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.errors import DatasetError, QueryError, SchemaError, TrajReplayError
from trajreplay.schema.identity import DATA
from trajreplay.schema.layout import entry_path
from trajreplay.schema.tables import SAMPLE_TABLES

INFO = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("rollout_id", pa.int64(), nullable=False),
        pa.field("step_id", pa.int64()),
        pa.field("ranks", list_of(pa.int32()), nullable=False),
        pa.field("expected_ranks", list_of(pa.int32()), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("problem", pa.string()),
    ]
)


def info(
    catalog: Catalog,
    run_id: str | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> pa.Table:
    """One row a capture set in report order, superseded attempts included.

    `status` is complete, incomplete, refused (contradictory or damaged) or superseded (by the
    attempt that was resumed from before it); `problem` is the first reason for what is not
    complete. A file that captures share is counted among the `bytes` of the first of them.

    Args:
        catalog: The lake.
        run_id: Only this run.
        progress: Called with the capture sets done and all of them.

    Raises:
        QueryError: There is no such run.
        DatasetError: An attempt record is damaged.
    """
    shown = lineages(catalog, run_id)
    cohorts = sorted(
        (one for one in catalog.by_cohort if one.run_id in shown), key=lambda one: one.order
    )
    rows = []
    counted: set[str] = set()
    for cohort in cohorts:
        rows.append(_row(catalog, cohort, shown[cohort.run_id], counted))
        if progress is not None:
            progress(len(rows), len(cohorts))
    return pa.Table.from_pylist(rows, schema=INFO)


def _row(catalog: Catalog, cohort: Cohort, lineage: Lineage, counted: set[str]) -> dict[str, Any]:
    captures = read_capture_set(catalog, cohort, lineage.overlaps.get(cohort, ()))
    reasons = captures.refusals()
    if not lineage.shows(cohort):
        status = "superseded"
    elif captures.problems:
        status = "refused"
    else:
        status = "incomplete" if captures.gaps else "complete"
    files = {file.path: file.bytes for entry in captures.entries for file in entry.files}
    size = sum(files[path] for path in files.keys() - counted)
    counted.update(files)
    return cohort._asdict() | {
        "ranks": list(captures.ranks),
        "expected_ranks": list(captures.expected_ranks),
        "status": status,
        "samples": sum(entry.rows for entry in captures.owners),
        "tokens": sum(entry.tokens for entry in captures.owners),
        "bytes": size,
        "problem": reasons[0] if reasons else None,
    }


@dataclass(frozen=True)
class Inspection:
    """Everything known of one capture set, as plain data.

    Args:
        cohort: Its coordinates.
        status: complete, incomplete, refused or superseded.
        problems: What is missing, contradictory or damaged.
        captures: One mapping a capture: identity, producer, settings, contracts, payload.
    """

    cohort: Cohort
    status: str
    problems: tuple[str, ...]
    captures: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            **self.cohort._asdict(),
            "status": self.status,
            "problems": list(self.problems),
            "captures": list(self.captures),
        }


def inspect(
    catalog: Catalog,
    rollout_id: int,
    step_id: int | None = None,
    *,
    run_id: str | None = None,
    attempt: int | None = None,
) -> Inspection:
    """Describe one capture set, whole or not.

    Args:
        catalog: The lake.
        rollout_id: Its rollout.
        step_id: Its step; None for the rollout's own captures.
        run_id: Its run; may be left out where only one run has such a capture set.
        attempt: Its attempt, superseded or not; the one in the lineage if omitted.

    Raises:
        QueryError: There is none, or several.
        DatasetError: An attempt record is damaged.
    """
    shown = lineages(catalog, run_id)
    there = [
        one
        for one in catalog.by_cohort
        if (one.rollout_id, one.step_id) == (rollout_id, step_id) and one.run_id in shown
    ]
    if attempt is not None:
        there = [one for one in there if one.attempt == attempt]
    elif len(there) > 1:
        there = [one for one in there if shown[one.run_id].shows(one)]
    if len(there) != 1:
        raise _not_one(catalog, there, rollout_id, step_id)
    cohort = there[0]
    row = _row(catalog, cohort, shown[cohort.run_id], set())
    overlap = shown[cohort.run_id].overlaps.get(cohort, ())
    problems = read_capture_set(catalog, cohort, overlap).refusals()
    return Inspection(cohort, row["status"], problems, tuple(_captures(catalog, cohort)))


def _not_one(
    catalog: Catalog, there: list[Cohort], rollout_id: int, step_id: int | None
) -> QueryError:
    what = f"rollout {rollout_id}" + ("" if step_id is None else f" step {step_id}")
    if there:
        return QueryError(
            f"{what} is there {len(there)} times: {'; '.join(map(str, there))}",
            hint="Say which: --run RUN, --attempt N.",
        )
    return QueryError(
        f"no capture of {what} in {catalog.store}", hint="To list what is there: trajreplay info"
    )


def _captures(catalog: Catalog, cohort: Cohort) -> Iterator[dict[str, Any]]:
    for key in catalog.by_cohort[cohort]:
        try:
            entry = catalog.entry(key)
            described = _described(entry)
        except TrajReplayError as error:
            yield {"rank": key.rank, "part": key.part, "problem": error.message}
            continue
        if key.part != DATA:
            described["reason"] = entry.reason
        else:
            described["provenance"] = _provenance(catalog, entry)
        yield described


def _described(entry: Entry) -> dict[str, Any]:
    return {
        "rank": entry.key.rank,
        "part": entry.key.part,
        "entry": entry_path(entry.key),
        "owner": entry.owner,
        "expected_ranks": list(entry.expected_ranks),
        "cohort_size": entry.cohort_size,
        "created_us": entry.created_us,
        "resumed_from": None if entry.resumed_from is None else list(entry.resumed_from),
        "producer": dict(entry.producer),
        "parallel": vars(entry.parallel),
        "settings": _settings(entry),
        "contracts": {name: one.to_json() for name, one in entry.contracts.items()},
        "tolerances": {name: vars(one) for name, one in entry.tolerances.items()},
        "origins": {name: vars(one) for name, one in entry.origins.items()},
        "sources": [list(source) for source in entry.sources],
        "redaction": dict(entry.redaction),
        "samples": entry.rows,
        "tokens": entry.tokens,
        "files": [_file(file) for file in entry.files],
        "outputs": [
            {name: value for name, value in vars(one).items() if value is not None}
            for one in entry.outputs
        ],
    }


def _settings(entry: Entry) -> Any:
    try:
        return entry.settings.to_json()
    except SchemaError as error:
        return {"problem": error.message}


def _file(file: DataFile) -> dict[str, Any]:
    return {
        "table": file.table,
        "path": file.path,
        "bytes": file.bytes,
        "rows": file.rows,
        "columns": {name: seal._asdict() for name, seal in file.columns.items()},
    }


def _provenance(catalog: Catalog, entry: Entry) -> dict[str, Any]:
    """Distinct physical units of the samples, where the data can be read."""
    names = ["rollout_partition_id", "consumer_batch_id", "micro_batch_id"]
    try:
        columns = read_columns(catalog.store, entry, SAMPLE_TABLES[entry.key.kind], names)
    except DatasetError as error:
        return {"problem": error.message}
    return {
        name: sorted(value for value in columns[name].unique().to_pylist() if value is not None)
        for name in names
    }

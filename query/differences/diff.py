"""Two runs held against each other, cohort by cohort: where they part, and how it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from trajreplay.query.differences.align import Alignment, align
from trajreplay.query.differences.compare import (
    FieldDifference,
    Tolerance,
    compare_column,
)
from trajreplay.query.differences.distributions import distribution
from trajreplay.query.differences.outputs import (
    compare_sample_outputs,
    compare_scalars,
    sample_outputs,
)
from trajreplay.query.differences.report import DiffReport, SettingDifference, stage_order
from trajreplay.query.differences.routed import compare_routes, route_seals
from trajreplay.query.differences.side import Side
from trajreplay.query.files.reading import read_columns
from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.columns import Column, Table
from trajreplay.schema.contracts import STAGE_OF_COLUMN
from trajreplay.schema.errors import QueryError, listed
from trajreplay.schema.tables import SAMPLE_TABLES

_ROLES = ("input", "output")
_GROUPS = ("group_id", "group_size")  # whose they are; names of another run mean nothing
_FACTS = ("weight_versions", "truncated")  # of how a sample came about, and judged by others


def diff(
    left: Side,
    right: Side,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Hold two runs against each other.

    Cohorts are aligned by rollout and step, samples by id within them, else by content. Values are
    compared by their bits, so that a NaN equals itself.

    Args:
        left: One side.
        right: The other.
        atol: |a - b| <= atol + rtol |b| counts as equal.
        rtol: See `atol`.
        progress: Called with the cohorts done and all of them.

    Raises:
        QueryError: They have no cohort in common.
        DatasetError: A file is not what its entry says.
    """
    report = DiffReport(*_names(left, right))
    mine, theirs = left.cohorts, right.cohorts
    common = sorted(mine.keys() & theirs.keys(), key=_order)
    if not common:
        raise _apart(left, right)
    report.only_left = [_label(one) for one in sorted(mine.keys() - theirs.keys(), key=_order)]
    report.only_right = [_label(one) for one in sorted(theirs.keys() - mine.keys(), key=_order)]
    known: set[str] = set()
    for done, place in enumerate(common, 1):
        sets = left.sets[mine[place]], right.sets[theirs[place]]
        refusals = [reason for one in sets for reason in one.refusals()]
        if refusals:
            report.refused[_label(place)] = listed(refusals)
        else:
            report.cohorts += 1
            _compare_settings(sets, known, report)
            _compare_sets((left, right), sets, Tolerance(atol, rtol), report)
        if progress is not None:
            progress(done, len(common))
    return report


def _apart(left: Side, right: Side) -> QueryError:
    """Why two sides have nothing to compare: one captured nothing, or what each has."""
    hint = "To list what is there: trajreplay info"
    empty = [str(one) for one in (left, right) if not one.cohorts]
    if empty:
        return QueryError(
            f"{' and '.join(empty)} captured no rollout or step: nothing can be compared", hint=hint
        )
    held = []
    for side in (left, right):
        places = sorted(side.cohorts, key=_order)
        first, last = places[0], places[-1]
        more = f" to {_told(last)}" if last != first else ""
        held.append(f"{side} has {_told(first)}{more}")
    return QueryError(
        f"{left} and {right} have no rollout or step in common: {', '.join(held)}", hint=hint
    )


def _told(place: tuple[int, int | None]) -> str:
    rollout, step = place
    return f"rollout {rollout}" if step is None else f"step {rollout}:{step}"


def _names(left: Side, right: Side) -> tuple[str, str]:
    """What the sides are called: the lake is said where nothing else tells them apart."""
    lakes = str(left.catalog.store), str(right.catalog.store)
    if str(left) != str(right) or lakes[0] == lakes[1]:
        return str(left), str(right)
    return f"{left} of {lakes[0]}", f"{right} of {lakes[1]}"


def _order(place: tuple[int, int | None]) -> tuple[int, int]:
    return place[0], -1 if place[1] is None else place[1]


def _label(place: tuple[int, int | None]) -> str:
    return f"rollout {place[0]}" + ("" if place[1] is None else f" step {place[1]}")


def _compare_settings(
    sets: tuple[CaptureSet, CaptureSet], known: set[str], report: DiffReport
) -> None:
    """Name each setting once, at the first cohort in which it differs."""
    trees = [[_flat(entry.settings.to_json()) for entry in one.entries] for one in sets]
    for name in sorted({name for side in trees for tree in side for name in tree}):
        left, right = (_stated(name, side) for side in trees)
        if left != right and name not in known:
            known.add(name)
            cohort = sets[0].cohort
            report.settings.append(
                SettingDifference(name, left, right, cohort.rollout_id, cohort.step_id)
            )


def _stated(name: str, trees: Sequence[Mapping[str, Any]]) -> Any:
    """A setting of one side: what all ranks state, else what each does, in order of rank."""
    found = [tree.get(name) for tree in trees]
    return found[0] if found and all(one == found[0] for one in found) else found or None


def _flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value
    return found


def _compare_sets(
    sides: tuple[Side, Side],
    sets: tuple[CaptureSet, CaptureSet],
    tolerance: Tolerance,
    report: DiffReport,
) -> None:
    cohort = sets[0].cohort
    table = SAMPLE_TABLES[sets[0].kind]
    found = compare_scalars(cohort, sets, tolerance)
    outputs = sample_outputs(sets, table)
    same = _seals(sets[0], table) == _seals(sets[1], table)
    same_outputs = not any(one.differs for one in outputs)
    same_routes = route_seals(sets[0]) == route_seals(sets[1])
    if same and same_outputs and same_routes:
        report.identical += not found
    else:
        columns = [
            column
            for column in table.columns
            if column.role in _ROLES or column.name in (*_GROUPS, *_FACTS)
            if not same and any(_has(one, table, column) for one in sets)
        ]
        names = [column.name for column in columns]
        for name in ("sample_id", "source_rollout_id", "context_rank", "rank", "tokens"):
            if name in table and name not in names:
                names.append(name)
        rows = [_rows(side, one, table, names) for side, one in zip(sides, sets, strict=True)]
        alignment = align(rows[0], rows[1])
        found += _compare_rows(cohort, columns, alignment, rows[0], rows[1], tolerance, report)
        if alignment.by is None:
            report.distributions += [one.distribution(cohort) for one in outputs]
        else:
            of_left = rows[0].take(pa.array(alignment.left, pa.int64()))
            found += compare_sample_outputs(cohort, outputs, alignment, of_left, tolerance)
            if not same_routes:
                stores = sides[0].catalog.store, sides[1].catalog.store
                ids, ranks = of_left["sample_id"].to_pylist(), of_left["rank"].to_pylist()
                named = list(zip(ids, ranks, strict=True))
                found += compare_routes(cohort, stores, sets, alignment, named)
    found.sort(key=lambda one: stage_order(one.stage))
    report.fields += found


def _compare_rows(
    cohort: Cohort,
    columns: list[Column],
    alignment: Alignment,
    left: pa.Table,
    right: pa.Table,
    tolerance: Tolerance,
    report: DiffReport,
) -> list[FieldDifference]:
    label = _label((cohort.rollout_id, cohort.step_id))
    if alignment.by is None:
        report.unaligned[label] = alignment.reason
        report.distributions += [
            distribution(cohort, one, left, right) for one in columns if one.role in _ROLES
        ]
        return []
    report.by_content += alignment.by == "content"
    if alignment.only_left or alignment.only_right:
        report.unpaired[label] = (alignment.only_left, alignment.only_right)
    left = left.take(pa.array(alignment.left, pa.int64()))
    right = right.take(pa.array(alignment.right, pa.int64()))
    compared = (
        compare_column(
            cohort,
            STAGE_OF_COLUMN.get(column.name, "sample"),
            column,
            _whole(left[column.name]),
            _whole(right[column.name]),
            left,
            tolerance,
        )
        for column in columns
        if alignment.by == "id" or column.name not in _GROUPS
    )
    return [one for one in compared if one is not None]


def _rows(side: Side, one: CaptureSet, table: Table, names: list[str]) -> pa.Table:
    store = side.catalog.store
    found = [read_columns(store, entry, table, names) for entry in one.owners]
    return pa.concat_tables(found)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks()


def _seals(one: CaptureSet, table: Table) -> list[dict[str, str]]:
    """The digests of what is compared, by rank: equal ones need no reading."""
    found = []
    for entry in one.owners:
        file = entry.file(table.name)
        seals = file.columns if file else {}
        compared = {
            name for name in seals if table[name].role in (*_ROLES, "identity") or name in _FACTS
        }
        found.append({name: seals[name].digest for name in compared})
    return found


def _has(one: CaptureSet, table: Table, column: Column) -> bool:
    files = [entry.file(table.name) for entry in one.owners]
    return any(file is not None and column.name in file.columns for file in files)

"""Handoffs: what a step consumed, against what the rollouts that it consumed from recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from trajreplay.schema.columns import has_column
from trajreplay.schema.tables import OWN_LENGTH, RESPONSE_LISTS
from trajreplay.stages.cohorts.checks import source_pairs
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.notes import HALF_DTYPES
from trajreplay.stages.cohorts.packed import list_lengths, packed_values
from trajreplay.stages.cohorts.sources import TWINS, Apart, Refused, Source, Sources
from trajreplay.stages.compare import EXAMPLES, Look
from trajreplay.stages.report import Divergence, Finding

_Rows = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Matched:
    """Rows of a step's table that come from one rollout, and their rows there."""

    source: Source
    mine: _Rows
    theirs: _Rows


def compare_handoffs(cohort: LoadedCohort, sources: Sources) -> Look:
    """Compare every twin column bit by bit, and put what should have come into `cohort.chained`.

    A rollout that is not in the lake changes no verdict: its handoffs are listed as not compared.
    One that is there under an attempt without steps leaves the stage unverified.
    """
    look = Look()
    if cohort.own_ids:
        message = "handoffs are not compared: the sample ids are those of an imported file"
        cohort.report.findings.append(Finding("handoff", "info", message, stage="sample"))
        return look
    matched = list(_match(cohort, sources, look))
    cohort.linked = bool(matched)
    held = set(cohort.table.column_names) if matched else set()
    for name in TWINS:
        if name not in held:
            continue
        how = cohort.settings.handoff.get(name, "exact")
        if how == "recomputed":
            continue
        for one in matched:
            if has_column(one.source.table, name):
                look = look.merged(_compare(cohort, one, name, how))
    for one in matched:
        _take_recomputed(cohort, one)
    return look


def _match(cohort: LoadedCohort, sources: Sources, look: Look) -> Iterator[Matched]:
    table, report = cohort.table, cohort.report
    attempts = table["source_attempt"].to_numpy()
    rollouts = table["source_rollout_id"].to_numpy()
    for attempt, rollout_id in sorted(source_pairs(table)):
        source = sources.find(report.run_id, attempt, rollout_id)
        if isinstance(source, str):
            message = f"handoffs are not compared: {source}"
            if isinstance(source, Refused):  # what is there and broken excuses nothing
                report.refusal = report.refusal or message
            apart = isinstance(source, Apart)
            cohort.apart = cohort.apart or (message if apart else "")
            finding = Finding("handoff", "warning" if apart else "info", message, stage="sample")
            report.findings.append(finding)
            continue
        mine = ((attempts == attempt) & (rollouts == rollout_id)).nonzero()[0]
        theirs = source.rows_of(table["sample_id"].take(pa.array(mine)))
        look.mismatches += int((theirs < 0).sum())
        look.ranks |= _ranks(cohort, mine[theirs < 0])
        for row in mine[theirs < 0].tolist()[:EXAMPLES]:
            sample_id = table["sample_id"][row].as_py()
            message = f"{sample_id} was consumed and is no sample of rollout {rollout_id}"
            report.findings.append(
                Finding("handoff.sample_id", "error", message, "sample", sample_id)
            )
        yield Matched(source, mine[theirs >= 0], theirs[theirs >= 0])


def _compare(cohort: LoadedCohort, one: Matched, name: str, how: str) -> Look:
    one = _recorded_on_both_sides(cohort, one, name)
    mine = _rows(cohort.table[name], one.mine)
    theirs = _rows(one.source.table[name], one.theirs)
    if not pa.types.is_list(mine.type):
        return _compare_scalars(cohort, one, name, how, mine, theirs)
    lengths, other = list_lengths(mine), list_lengths(theirs)
    alike = (lengths == other).nonzero()[0]
    look = Look(compared=len(lengths), mismatches=len(lengths) - len(alike))
    if look.mismatches:
        look.ranks |= _ranks(cohort, one.mine[lengths != other])
        first = int((lengths != other).nonzero()[0][0])
        _find(cohort, name, one.mine[first], None, int(lengths[first]), int(other[first]))
        mine, theirs = _rows(mine, alike), _rows(theirs, alike)
    lengths = lengths[alike]
    recorded, origin = packed_values(mine), packed_values(theirs)
    if how in HALF_DTYPES:
        origin = origin.to(HALF_DTYPES[how]).to(origin.dtype)
    differs = _bits(recorded) != _bits(origin)
    if how == "masked" and name in RESPONSE_LISTS:
        differs &= packed_values(_rows(cohort.table["loss_mask"], one.mine[alike])) != 0
    if not bool(differs.any()):
        return look
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = one.mine[alike]
    positions = differs.nonzero().squeeze(1)
    owners = np.searchsorted(offsets, positions.numpy(), side="right") - 1
    look.mismatches += len(np.unique(owners))
    look.ranks |= _ranks(cohort, rows[np.unique(owners)])
    _examples(cohort, name, look, rows, owners, positions, offsets, recorded, origin)
    _replace(cohort, name, rows, offsets, np.unique(owners), origin)
    return look


def _recorded_on_both_sides(cohort: LoadedCohort, one: Matched, name: str) -> Matched:
    """The samples for which both the step and the rollout recorded a column."""
    columns = cohort.table[name], one.source.table[name]
    if not columns[0].null_count and not columns[1].null_count:
        return one
    valid = (np.asarray(column.is_valid().to_numpy(), bool) for column in columns)
    both = next(valid)[one.mine] & next(valid)[one.theirs]
    return Matched(one.source, one.mine[both], one.theirs[both])


def _compare_scalars(
    cohort: LoadedCohort,
    one: Matched,
    name: str,
    how: str,
    mine: pa.ChunkedArray,
    theirs: pa.ChunkedArray,
) -> Look:
    look = Look(compared=len(mine))
    if pa.types.is_string(mine.type):
        differs = pc.not_equal(mine, theirs).to_numpy()
        values = None
    else:
        recorded = torch.from_numpy(np.array(mine.to_numpy(), np.float64))
        origin = torch.from_numpy(np.array(theirs.to_numpy(), np.float64))
        if how in HALF_DTYPES:
            origin = origin.to(HALF_DTYPES[how]).double()
        differs = (_bits(recorded) != _bits(origin)).numpy()
        values = recorded, origin
    look.ranks = _ranks(cohort, one.mine[differs.nonzero()[0]])
    for at in differs.nonzero()[0].tolist():
        look.mismatches += 1
        if look.mismatches > EXAMPLES:
            continue
        row = int(one.mine[at])
        if values is None:
            _find(cohort, name, row, None, mine[at].as_py(), theirs[at].as_py())
            continue
        pair = float(values[0][at]), float(values[1][at])
        _find(cohort, name, row, None, *pair)
        look.divergences.append(_divergence(cohort, name, row, None, *pair))
        if name == "reward":
            held = np.array(cohort.table[name].to_numpy(), np.float64)
            chained = cohort.chained.setdefault(name, torch.from_numpy(held))
            chained[row] = pair[1]
    return look


def _ranks(cohort: LoadedCohort, rows: _Rows) -> frozenset[int]:
    """The ranks of rows of a step."""
    return frozenset(pc.unique(_rows(cohort.table["rank"], rows)).to_pylist())


def _examples(
    cohort: LoadedCohort,
    name: str,
    look: Look,
    rows: _Rows,
    owners: _Rows,
    positions: Tensor,
    offsets: _Rows,
    recorded: Tensor,
    origin: Tensor,
) -> None:
    """The first token of each of the first samples that differ."""
    _, first = np.unique(owners, return_index=True)
    for at in first[:EXAMPLES].tolist():
        token, owner = int(positions[at]), int(owners[at])
        pair = float(recorded[token]), float(origin[token])
        place = int(rows[owner]), token - int(offsets[owner])
        look.divergences.append(_divergence(cohort, name, *place, *pair))
        if at == first[0]:
            _find(cohort, name, *place, *pair)
    if name != "loss_mask":
        error = (recorded.double() - origin.double())[positions].abs().max()
        look.max_abs_error = max(look.max_abs_error, float(error))


def _replace(
    cohort: LoadedCohort, name: str, rows: _Rows, offsets: _Rows, owners: _Rows, origin: Tensor
) -> None:
    """Put the rollout's values in the place of the step's, for the chained look."""
    target, starts = _chained_column(cohort, name)
    for owner in owners.tolist():
        values = origin[int(offsets[owner]) : int(offsets[owner + 1])]
        start = int(starts[rows[owner]])
        target[start : start + len(values)] = values.to(target.dtype)


def _take_recomputed(cohort: LoadedCohort, one: Matched) -> None:
    """Follow the chain: what the rollout's own replay found instead of what it recorded."""
    for name, rows in one.source.recomputed.items():
        if not has_column(cohort.table, name) or not rows:
            continue
        ids = _rows(cohort.table["sample_id"], one.mine).to_pylist()
        for row, sample_id in zip(one.mine.tolist(), ids, strict=True):
            values = rows.get(sample_id)
            if values is None:
                continue
            if values.dim() == 0:
                held = np.array(cohort.table[name].to_numpy(), np.float64)
                cohort.chained.setdefault(name, torch.from_numpy(held))[row] = values
                continue
            target, starts = _chained_column(cohort, name)
            start, stop = int(starts[row]), int(starts[row + 1])
            if stop - start == len(values):
                target[start:stop] = values


def _chained_column(cohort: LoadedCohort, name: str) -> tuple[Tensor, _Rows]:
    column = cohort.table[name]
    if name not in cohort.chained:
        values = packed_values(column)
        cohort.chained[name] = values != 0 if name == "loss_mask" else values.double()
    lengths = np.maximum(list_lengths(column), 0)
    return cohort.chained[name], np.concatenate([[0], np.cumsum(lengths)])


def _find(
    cohort: LoadedCohort, name: str, row: int, token: int | None, found: object, came: object
) -> None:
    sample_id = str(cohort.table["sample_id"][int(row)].as_py())
    noun = "component" if name in OWN_LENGTH else "token"
    where = sample_id if token is None else f"{sample_id} {noun} {token}"
    message = f"{name} of {where}: the step consumed {found}, its rollout recorded {came}"
    place = None if name in OWN_LENGTH else token
    finding = Finding(f"handoff.{name}", "error", message, "sample", sample_id, place)
    cohort.report.findings.append(finding)


def _divergence(
    cohort: LoadedCohort, name: str, row: int, token: int | None, found: float, came: float
) -> Divergence:
    table = cohort.table
    return Divergence(
        f"handoff.{name}",
        found,
        came,
        sample_id=table["sample_id"][row].as_py(),
        group_id=table["group_id"][row].as_py(),
        rank=table["rank"][row].as_py(),
        token=None if name in OWN_LENGTH else token,
    )


def _rows(column: pa.ChunkedArray, rows: _Rows) -> pa.ChunkedArray:
    """Rows of a column, without a copy where they are a run of it."""
    if (
        len(rows)
        and int(rows[-1]) - int(rows[0]) + 1 == len(rows)
        and bool((np.diff(rows) == 1).all())
    ):
        return column.slice(int(rows[0]), len(rows))
    return column.take(pa.array(rows))


def _bits(values: Tensor) -> Tensor:
    """The bit patterns of floats, so that NaN equals itself and -0.0 differs from 0.0."""
    patterns = {torch.float32: torch.int32, torch.float64: torch.int64}
    return values.view(patterns[values.dtype]) if values.dtype in patterns else values

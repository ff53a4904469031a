"""The recorded scalars of a context-parallel group, as those of one rank with whole samples."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.entry import Entry, Output
from trajreplay.schema.lists import Int64s
from trajreplay.stages.compose.aggregates import aggregation_of
from trajreplay.stages.report import CohortReport, Finding

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Part:
    """What one rank captured: its entry, and the rows that are wanted of it."""

    entry: Entry
    table: pa.Table


def joined_outputs(
    parts: list[tuple[Part, Int64s]],
    *,
    whole: pa.Table,
    sharded: bool,
    dynamic: bool = False,
    report: CohortReport | None,
) -> tuple[Output, ...]:
    """The outputs of a group under the name of its first rank.

    Where each rank reduced its own tokens and divided by what the whole sample or scope has, the
    sum over the ranks is the value of all (slime); where it divided by its own tokens, it is that
    of the numerators over that of the denominators (Relax). Which of the two it was the stated
    denominators say; a mean over tokens, or over samples that other ranks hold, which states none
    is left out, and so is what not every rank has. Scalars of the whole cohort, and all where ranks
    hold whole samples, are the same on each rank, and held against the first that has them.

    Args:
        parts: The ranks, each with the number of the sample that each of its rows is.
        whole: The samples put together.
        sharded: Whether they hold shards.
        dynamic: Whether they hold shards of other samples each.
        report: Gets a finding for each rank that recorded another value.
    """
    if not any(part.entry.outputs for part, _ in parts):
        return ()
    count = max((int(rows.max(initial=-1)) for _, rows in parts), default=-1) + 1
    lead = parts[0][0]
    held = count if dynamic else lead.entry.rows
    found: dict[tuple[str, ...], list[tuple[Part, Output]]] = defaultdict(list)
    for part, rows in parts:
        # What a rank does not hold, it adds nothing to; what was not asked for, nobody looks at.
        order = np.arange(count) if dynamic else np.asarray(lead.table["row"].to_numpy())
        base = np.full(held, 0.0 if dynamic else np.nan)
        for one in part.entry.outputs:
            name = one.stage, one.field, str(one.scope), str(one.micro_batch_id)
            found[name].append((part, _in_order(one, part, order[rows], base)))
    outputs: list[Output] = []
    for same in sorted(found.values(), key=lambda one: STAGE_NAMES.index(one[0][1].stage)):
        values = [one for _, one in same]
        if not (sharded or dynamic) or values[0].scope in ("global", None):
            _note_others(same, report)
            outputs.append(values[0])
            continue
        there = {id(part) for part, _ in same}
        asked = [part for part, _ in parts if not dynamic or _covers(values[0], part)]
        every = all(id(part) in there for part in asked)
        alike = len({(one.reduction, one.scale) for one in values}) == 1
        if not (every and alike):
            continue
        joined = _joined(values, lead.entry, whole, dynamic=dynamic)
        if joined is not None:
            outputs.append(joined)
        else:
            _note_unstated(values[0], report)
    return tuple(outputs)


def _joined(values: list[Output], entry: Entry, whole: pa.Table, *, dynamic: bool) -> Output | None:
    """One output of those of each rank; None where they do not say how to make it."""
    first = values[0]
    # A rank whose shards have no tokens that count has a mean of 0, over nothing that it can state.
    saying = [one for one in values if one.value != 0.0 or one.denominator is not None] or values
    stated = [one.denominator for one in saying]
    alike = len(set(stated)) == 1
    if first.values is not None or first.reduction == "sum":
        return _summed(values) if alike else None
    loss = aggregation_of(entry.settings, first.stage, first.field)
    by_tokens = loss.aggregation == "token-mean"
    known = [one for one in stated if one is not None]
    if len(known) < len(stated):
        return _summed(values) if alike and not dynamic and not by_tokens else None
    least = 1 if loss.token_count == "at-least-one" else 0
    trained = _trained(first, whole, least) if by_tokens else None
    # Equal ones are of all where they are nearer to what all trained than their sum is.
    own = trained is not None and abs(sum(known) - trained) < abs(known[0] - trained)
    if not alike or own:
        return _weighted(saying, known)
    return _summed(saying)


def _trained(output: Output, whole: pa.Table, least: int) -> int | None:
    """The trained tokens that a scalar is over, of each sample at least so many, where known."""
    if "loss_mask" not in whole.column_names:
        return None
    masks = whole["loss_mask"]
    if output.scope == "micro_batch":
        masks = masks.filter(pc.equal(whole["micro_batch_id"], output.micro_batch_id))
    trained = np.count_nonzero(masks.combine_chunks().flatten().to_numpy())
    if not least:
        return int(trained)
    counts = [int(np.count_nonzero(one)) for one in masks.to_pylist()]
    return sum(max(one, least) for one in counts)


def _note_unstated(output: Output, report: CohortReport | None) -> None:
    if report is None:
        return
    message = (
        f"{output.field} of the ranks of a context-parallel group says not, or not alike, what it "
        "was divided by: its own tokens, or those of all; record its denominator"
    )
    known = [one for one in report.findings if one.message == message]
    if not known:
        report.findings.append(Finding("shards.unstated", "warning", message, stage=output.stage))


def _covers(output: Output, part: Part) -> bool:
    """Whether a rank has samples that an output is over."""
    if output.scope != "micro_batch":
        return bool(part.table.num_rows > 0)
    return bool(output.micro_batch_id in part.table["micro_batch_id"].to_pylist())


def _in_order(output: Output, part: Part, rows: Int64s, base: Floats) -> Output:
    """Values of samples, by their rows in the group instead of the rank's own."""
    if output.values is None:
        return output
    values = base.copy()
    values[rows] = np.array(output.values)[np.asarray(part.table["row"].to_numpy())]
    return replace(output, values=tuple(values.tolist()))


def _note_others(same: list[tuple[Part, Output]], report: CohortReport | None) -> None:
    (lead, first), *others = same
    for part, one in others:
        if report is not None and repr(one) != repr(first):
            message = (
                f"context-parallel rank {part.entry.key.rank} recorded another {one.field} than "
                f"rank {lead.entry.key.rank}: {one.value if one.values is None else one.values}"
            )
            report.findings.append(Finding("copy", "error", message, stage=one.stage))
            return


def _summed(outputs: list[Output]) -> Output:
    columns = [one.values for one in outputs if one.values is not None]
    values = tuple(map(sum, zip(*columns, strict=True))) if columns else None
    return replace(
        outputs[0],
        value=_total([one.value for one in outputs]),
        values=values,
        numerator=_total([one.numerator for one in outputs]),
    )


def _weighted(outputs: list[Output], denominators: list[float]) -> Output:
    """The mean over all of what each rank has a mean over its own of."""
    total, value = sum(denominators), 0.0
    for one, divided in zip(outputs, denominators, strict=True):
        if divided:  # the mean of nothing has no part in it, whatever it is
            value += np.nan if one.value is None else one.value * divided / total
    numerator = _total([one.numerator for one in outputs])
    return replace(outputs[0], value=value, numerator=numerator, denominator=total)


def _total(values: list[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) if known and len(known) == len(values) else None

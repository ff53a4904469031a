"""The recorded scalars of a context-parallel group, as those of one rank with whole samples."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.entry import Entry, Output
from trajreplay.schema.lists import Int64s
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
    sharded: bool,
    dynamic: bool = False,
    report: CohortReport | None,
) -> tuple[Output, ...]:
    """The outputs of a group under the name of its first rank.

    Where each rank reduced its own tokens, it divided by what the whole sample or scope has, so
    that the sum over the ranks is the value of all; one that not every rank has is left out.
    Scalars of the whole cohort, and all where ranks hold whole samples, are the same on each rank,
    and held against the first that has them. Where ranks hold shards of other samples each, means
    are added up only if they say what all of them were divided by.

    Args:
        parts: The ranks, each with the number of the sample that each of its rows is.
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
        alike = len({_meaning(one) for one in values}) == 1
        unsaid = dynamic and values[0].reduction != "sum" and values[0].denominator is None
        if every and alike and not (unsaid and values[0].values is None):
            outputs.append(_summed(values))
    return tuple(outputs)


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


def _meaning(output: Output) -> tuple[object, ...]:
    return output.reduction, output.denominator, output.scale


def _total(values: list[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) if known and len(known) == len(values) else None

"""The recorded scalars of a context-parallel group, as those of one rank with whole samples."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import pyarrow as pa

from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.entry import Entry, Output
from trajreplay.stages.report import CohortReport, Finding


@dataclass(frozen=True)
class Part:
    """What one rank captured: its entry, and the rows that are wanted of it."""

    entry: Entry
    table: pa.Table


def joined_outputs(
    parts: list[Part], *, sharded: bool, report: CohortReport | None
) -> tuple[Output, ...]:
    """The outputs of a group under the name of its first rank.

    Where each rank reduced its own tokens, it divided by what the whole sample or scope has, so
    that the sum over the ranks is the value of all; one that not every rank has is left out.
    Scalars of the whole cohort, and all where ranks hold whole samples, are the same on each rank,
    and held against the first that has them.

    Args:
        parts: The ranks, the rows of each in the order of the first one's.
        sharded: Whether they hold shards.
        report: Gets a finding for each rank that recorded another value.
    """
    found: dict[tuple[str, ...], list[tuple[Part, Output]]] = defaultdict(list)
    for part in parts:
        for one in part.entry.outputs:
            name = one.stage, one.field, str(one.scope), str(one.micro_batch_id)
            found[name].append((part, _in_order(one, part, parts[0])))
    outputs: list[Output] = []
    for same in sorted(found.values(), key=lambda one: STAGE_NAMES.index(one[0][1].stage)):
        values = [one for _, one in same]
        if not sharded or values[0].scope in ("global", None):
            _note_others(same, report)
            outputs.append(values[0])
        elif len(same) == len(parts) and len({_meaning(one) for one in values}) == 1:
            outputs.append(_summed(values))
    return tuple(outputs)


def _in_order(output: Output, part: Part, lead: Part) -> Output:
    """Values of samples, by the rows of the first rank instead of the rank's own."""
    if output.values is None or part is lead:
        return output
    mine, theirs = part.table["row"].to_pylist(), lead.table["row"].to_pylist()
    values = [math.nan] * lead.entry.rows
    for own, row in zip(mine, theirs, strict=True):
        values[row] = output.values[own]
    return replace(output, values=tuple(values))


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

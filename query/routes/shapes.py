"""Shapes of what routers were set to and of what forwards used, held against assignments."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.trace import Cell, Pass, Replays, Trace
from trajreplay.schema.bundles.r3.records import Origin, TensorRecord, Verification

Shape = tuple[int, ...]


def check_replay_shapes(trace: Trace, cells: Sequence[Cell], say: RouteFindings) -> None:
    """Check that all records of a layer are of tensors `[rows, top_k]` of one micro-batch.

    Hashes do not cover shapes, and only what was assigned is compared with a shard, of the first
    micro-batches: so what a router installs, uses and expects has the shape of its assignment,
    every assignment the choices of the shards and the rows of its rank's other layers, and scores
    a row for each.

    Args:
        trace: The trace.
        cells: Layers that were assigned.
        say: The findings.
    """
    top_k = {shard.routes.shape[3:] for one in trace.shards.values() for shard in one.values()}
    widths = {
        one.scores_shape[-1]
        for cell in cells
        for one in trace.replays[cell].verified
        if one.scores_shape
    }
    if len(widths) > 1:
        shown = ", ".join(str(one) for one in sorted(widths))
        say.fail("tensor.shape", f"scores are of {shown} experts, expected as many everywhere")
    for cell in cells:
        wrong = next(_wrong(trace, cell, next(iter(top_k)) if len(top_k) == 1 else ()), None)
        if wrong:
            origin, what = wrong
            say.fail(
                "tensor.shape",
                f"{cell.told} ({origin.file}, line {origin.line}): {what}",
                **cell.where,
            )


def _wrong(trace: Trace, cell: Cell, top_k: Shape) -> Iterator[tuple[Origin, str]]:
    replays = trace.replays[cell]
    rows = trace.rows_of(Pass(cell.stage, cell.step, cell.rank))
    for number, assigned in enumerate(replays.assigned, 1):
        shape = assigned.routes.shape
        if len(shape) != 2 or (top_k and shape[1:] != top_k):
            expected = f"[rows, {top_k[0]}]" if top_k else "[rows, top_k]"
            yield assigned.origin, f"{list(shape)} were assigned, expected {expected}"
        elif shape[0] != rows[number]:
            others = f"{rows[number]} to another layer"
            what = f"{shape[0]} rows were assigned in micro-batch {number}, {others}"
            yield assigned.origin, what
    shapes = _shapes(replays)
    actions = [*replays.forward, *replays.backward]
    for action in actions:
        if action.routes and (what := _misfit(action.routes, shapes)):
            yield action.origin, f"{what} installed"
    for one in (*replays.verified, *replays.verified_backward):
        if one.expected and one.expected.shape == one.actual.shape:
            what = _misfit(one.expected, shapes) or _unlike(one)
            if what:
                yield one.origin, f"{what} verified"


def _shapes(replays: Replays) -> dict[str, set[Shape]]:
    """Shapes of what was assigned, and of what forwards used where rows had no route, by hash."""
    found: dict[str, set[Shape]] = defaultdict(set)
    for one in replays.assigned:
        found[one.routes.sha256].add(one.routes.shape)
    for used in replays.verified:
        if used.fallback_rows:
            found[used.actual.sha256].add(used.actual.shape)
    return found


def _misfit(tensor: TensorRecord, shapes: dict[str, set[Shape]]) -> str:
    known = shapes.get(tensor.sha256)  # of others another rule says that nobody assigned them
    if not known or tensor.shape in known:
        return ""
    expected = " or ".join(str(list(one)) for one in sorted(known))
    return f"{list(tensor.shape)}, not {expected} as assigned, were"


def _unlike(one: Verification) -> str:
    """What a verification says of its choices and scores, where its tensors are not like it."""
    rows, *choices = one.actual.shape or (0,)
    if choices != [one.top_k]:
        return f"{list(one.actual.shape)} for the {one.top_k} choices of topk were"
    scores = one.scores_shape
    if scores and (math.prod(scores[:-1]) != rows or scores[-1] < one.top_k):
        return f"{list(one.actual.shape)} of scores {list(scores)} were"
    return ""

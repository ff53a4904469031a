"""Micro-batches beyond those whose shards are recorded: what their assignments alone tell."""

from __future__ import annotations

from collections.abc import Iterator

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import STAGES, RoutePolicy
from trajreplay.query.routes.trace import Cell, Pass, Trace

_BEFORE, _AFTER = STAGES
# By layer, hash and shape of what was assigned.
_Layers = tuple[tuple[int, str, tuple[int, ...]], ...]


def check_beyond(trace: Trace, policy: RoutePolicy, say: RouteFindings) -> None:
    """Say of which micro-batches nothing was compared, with a shard or with the other stage.

    Shards are recorded of the first micro-batches of a pass, assignments of all. Where both stages
    take the same micro-batches, all layers of one are assigned the same again.

    Args:
        trace: The trace.
        policy: The stages that replay.
        say: The findings.
    """
    found = {stage: list(_batches(trace, stage)) for stage in policy.stages}
    hidden = sum(not recorded for batches in found.values() for _, recorded in batches)
    if hidden:
        total = sum(len(batches) for batches in found.values())
        say.unverified(
            "installed.payload",
            f"{hidden} of {total} micro-batches of the ranks: their shards are not recorded, with "
            "which routes would be compared",
        )
    if len(policy.stages) < len(STAGES):
        return
    for stage, other in ((_BEFORE, _AFTER), (_AFTER, _BEFORE)):
        known = {layers for layers, _ in found[other]}
        alone = sum(not recorded and layers not in known for layers, recorded in found[stage])
        if alone:
            say.unverified(
                "stage.routes",
                f"{alone} micro-batches of {stage} without a recorded shard were assigned other "
                f"routes than all of {other}: whether these are of the same tokens is not known",
                stage=stage,
            )
    _compare_rows(trace, say)


def _batches(trace: Trace, stage: str) -> Iterator[tuple[_Layers, bool]]:
    """Of every rank what each micro-batch was assigned, and whether its shard is recorded."""
    for one in sorted(found for found in trace.passes if found.stage == stage):
        recorded = set(trace.shards_of(one))
        for number in range(1, max(trace.assigned_in(one).values(), default=0) + 1):
            layers = []
            for layer in sorted(trace.assigned_in(one)):
                assigned = trace.replays[Cell(*one, layer)].assigned
                if len(assigned) >= number:
                    routes = assigned[number - 1].routes
                    layers.append((layer, routes.sha256, routes.shape))
            yield tuple(layers), number in recorded


def _compare_rows(trace: Trace, say: RouteFindings) -> None:
    """Count the rows that a rank replays of all micro-batches."""
    for rank in trace.world:
        before, after = (
            sum(
                sum(trace.rows_of(Pass(stage, step, rank)).values())
                for step in trace.steps.get(stage, ())
            )
            for stage in (_BEFORE, _AFTER)
        )
        if after < before:
            say.unverified(
                "stage.routes",
                f"rank {rank} replayed {after} rows in train and {before} in prev-logprob: whether "
                "only padding is missing is not known",
                stage=_AFTER,
                rank=rank,
            )

"""That one slice of a shard is one tensor, in whatever stage and on whatever rank it is assigned.

Hashes of a shard say nothing about its layers. But a layer's routes are a function of the shard
and of the part that a tensor rank takes of it, so that the same hashes come out everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.topology import Topology
from trajreplay.query.routes.trace import Batch, Cell, Trace
from trajreplay.schema.bundles.r3.records import Assignment, Shard


class _Slice(NamedTuple):
    """What an assignment is a function of.

    Args:
        shard: Hash of the shard.
        shape: Of the shard, since hashes do not cover it.
        layer: The layer.
        rows: Rows that are assigned.
        part: Which of the tensor ranks' parts; 0 where each has all rows. Where no order of ranks
            is known, the rank.
    """

    shard: str
    shape: tuple[int, ...]
    layer: int
    rows: int
    part: int


class _Place(NamedTuple):
    batch: Batch
    rank: int
    assigned: Assignment


def check_assigned(
    trace: Trace, topology: Topology, policy: RoutePolicy, say: RouteFindings
) -> None:
    """Find slices that were assigned as other routes in another stage, or on another rank."""
    if say.has_failed("assign.count", "tensor.shape"):
        return  # which assignment is of which shard is not known
    slices: dict[_Slice, list[_Place]] = defaultdict(list)
    for batch, rank, shard in _shards(trace, policy):
        for layer in sorted(trace.layers_of[rank]):
            cell = trace.replays.get(Cell(batch.stage, batch.step, rank, layer))
            if cell and len(cell.assigned) >= batch.microbatch:
                one = cell.assigned[batch.microbatch - 1]
                of = _slice(topology, rank, shard, one)
                slices[of].append(_Place(batch, rank, one))
    said: set[object] = set()
    for of, places in slices.items():
        _check_slice(of, places, said, say)


def _shards(trace: Trace, policy: RoutePolicy) -> Iterator[tuple[Batch, int, Shard]]:
    for batch, shards in sorted(trace.shards.items()):
        for rank, shard in sorted(shards.items()) if batch.stage in policy.stages else ():
            yield batch, rank, shard


def _slice(topology: Topology, rank: int, shard: Shard, one: Assignment) -> _Slice:
    shape = shard.routes.shape
    rows = one.routes.shape[0]
    block = topology.block_of(rank)
    part = 0
    if rows < shape[0] * shape[1]:
        part = rank if block is None else block.ranks.index(rank) % block.tensor
    return _Slice(shard.routes.sha256, shape, one.layer, rows, part)


def _check_slice(of: _Slice, places: list[_Place], said: set[object], say: RouteFindings) -> None:
    """Within a stage ranks disagree, else stages do."""
    first: dict[str, _Place] = {}
    for place in places:
        batch, rank, one = place
        before = first.setdefault(batch.stage, place)
        rule = "installed.payload"
        if before.assigned.routes.sha256 == one.routes.sha256:
            before, rule = next(iter(first.values())), "stage.routes"
        if before.assigned.routes.sha256 == one.routes.sha256:
            continue
        key = (rule, batch.stage, rank, of.layer)
        if key in said:
            continue
        said.add(key)
        say.fail(
            rule,
            f"rank {rank} assigned other routes to layer {of.layer} for micro-batch "
            f"{batch.microbatch} of {batch.stage} at step {batch.step} than rank {before.rank} did "
            f"for micro-batch {before.batch.microbatch} of {before.batch.stage} at step "
            f"{before.batch.step}, of an equal shard",
            stage=batch.stage,
            trace_step=batch.step,
            microbatch=batch.microbatch,
            rank=rank,
            layer=of.layer,
        )

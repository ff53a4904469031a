"""Micro-batches that are replayed twice: what only fetches could tell is left open."""

from __future__ import annotations

from collections import defaultdict

from trajreplay.query.routes.fetched import content_of, recorded_in
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.topology import Block, Topology
from trajreplay.query.routes.trace import Trace


def check_repeated(
    trace: Trace, topology: Topology, policy: RoutePolicy, say: RouteFindings
) -> None:
    """Find equal micro-batches in one pass of the same layers, which may stand for others.

    Samples may be equal, and so may micro-batches: it is left open. Where neither context nor
    sequence is divided, tensor ranks look like replicas, and only one rank's own are compared.

    Args:
        trace: The trace.
        topology: Which ranks work together.
        policy: The stages that replay.
        say: The findings.
    """
    for stage in policy.stages:
        for step in trace.steps.get(stage, ()):
            seen: dict[object, list[tuple[Block, int]]] = defaultdict(list)
            for block in topology.blocks:
                whose = block.layers if topology.tells_replicas else block.ranks
                for number, shards in recorded_in(trace, stage, step, block).items():
                    content = tuple(content_of(shard) for shard in shards)
                    if any(shard.verified for shard in shards):
                        seen[whose, content].append((block, number))
            again = [places for places in seen.values() if len(places) > 1]
            if again:
                (first, number), (block, other) = again[0][:2]
                say.unverified(
                    "assign.coverage",
                    f"{sum(map(len, again)) - len(again)} micro-batches of {stage} at step {step} "
                    f"are equal to others, first {other} of rank {block.ranks[0]} to {number} of "
                    f"rank {first.ranks[0]}: whether others should be in their place is not known",
                    stage=stage,
                    trace_step=step,
                    microbatch=other,
                    rank=block.ranks[0],
                )

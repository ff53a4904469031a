"""Whether every stage, rank, layer and micro-batch that should have records has them."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.layers import check_layers
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.topology import Topology
from trajreplay.query.routes.trace import Batch, Cell, Pass, Trace

_TOLD = 10  # missing steps that are told


def check_coverage(
    trace: Trace, topology: Topology, policy: RoutePolicy, say: RouteFindings
) -> None:
    """Check ranks, stages, layers, counts and shards."""
    if all(one.origin.world_size is None for one in trace.records):
        message = "no record says how many ranks the job has: one that left no trace is not missed"
        say.unverified("rank.coverage", message)
    for stage in policy.stages:
        if not any(cell.stage == stage for cell, one in trace.replays.items() if one.assigned):
            say.fail("assign.coverage", f"no assignment in {stage}", stage=stage)
            continue
        _check_steps(stage, trace, policy, say)
        for step in trace.steps[stage]:
            _check_ranks(stage, step, trace, topology, say)
            _check_counts(stage, step, trace, topology, say)
    check_layers(trace, topology, policy, say)
    _check_shards(trace, topology, policy, say)


def _check_steps(stage: str, trace: Trace, policy: RoutePolicy, say: RouteFindings) -> None:
    """A process counts the steps of a stage from 1 on, and train has one at least of each before.

    Records of a time window may begin later; where one stage begins at 1, the others do, too, and
    train begins no later than prev-logprob, unless it counts several steps for each of its.
    """
    found = set(trace.steps[stage])
    stated = [trace.steps.get(one, []) for one in policy.stages]
    begins = any(1 in steps for steps in stated)
    before = trace.steps.get("prev-logprob", []) if stage == "train" else []
    first = 1 if begins else min([*found, *before])
    last = max(*found, *before, first)
    if before and first < min(found) and max(found) > max(before) and not begins:
        say.unverified(
            "assign.coverage",
            f"prev-logprob begins at step {first}, {stage} at {min(found)} and counts further: "
            "whether one before is missing is not known",
            stage=stage,
        )
        first = min(found)
    missing = (step for step in range(first, last + 1) if step not in found)
    for step in islice(missing, _TOLD):
        say.fail(
            "assign.coverage",
            f"nothing of {stage} at step {step}, expected one of each from {first} to {last}",
            stage=stage,
            trace_step=step,
        )


def _check_ranks(
    stage: str, step: int, trace: Trace, topology: Topology, say: RouteFindings
) -> None:
    for rank in trace.world:
        one = Pass(stage, step, rank)
        if one not in trace.passes:
            say.fail(
                "rank.coverage",
                f"rank {rank} has no record of {stage} at step {step}",
                stage=stage,
                trace_step=step,
                rank=rank,
            )
            continue
        block = topology.block_of(rank)
        expected = trace.layers_of[rank] | (block.layers if block else set())
        for layer in sorted(expected - trace.assigned_in(one).keys()):
            say.fail(
                "layer.coverage",
                f"rank {rank} does not replay layer {layer} in {stage} at step {step}",
                stage=stage,
                trace_step=step,
                rank=rank,
                layer=layer,
            )


def _check_counts(
    stage: str, step: int, trace: Trace, topology: Topology, say: RouteFindings
) -> None:
    """Every layer of a rank is assigned once a micro-batch, whose shards may be capped.

    All pipeline stages of a replica see the same micro-batches.
    """
    for rank in trace.world:
        one = Pass(stage, step, rank)
        counts = trace.assigned_in(one)
        peers = [Pass(stage, step, peer) for peer in topology.replica_of(rank)]
        most = max((max(trace.assigned_in(peer).values(), default=0) for peer in peers), default=0)
        most = max([most, *(number for peer in peers for number in trace.shards_of(peer))])
        for layer, count in sorted(counts.items()):
            if count != most:
                say.fail(
                    "assign.count",
                    f"rank {rank} assigned layer {layer} {count} times in {stage} at step {step}, "
                    f"expected {most}: once a micro-batch",
                    stage=stage,
                    trace_step=step,
                    rank=rank,
                    layer=layer,
                )


def _check_shards(
    trace: Trace, topology: Topology, policy: RoutePolicy, say: RouteFindings
) -> None:
    """Every rank of a traced stage recorded the micro-batches that any rank recorded."""
    capped = max((batch.microbatch for batch in trace.shards), default=0)
    places: dict[int, set[tuple[int, int]]] = {}
    for shards in trace.shards.values():
        for rank, shard in shards.items():
            places.setdefault(rank, set()).add((shard.cp_rank, shard.cp_size))
    for rank, found in sorted(places.items()):
        odd = [place for place in found if place[1] != topology.cp_size or place[0] >= place[1]]
        if len(found) > 1 or odd:
            shown = ", ".join(f"{place} of {size}" for place, size in sorted(found))
            say.fail("cp.coverage", f"rank {rank} is context-parallel rank {shown}", rank=rank)
    held = Counter(min(found)[0] for found in places.values())
    if len(places) == len(trace.world) and not say.has_failed("cp.coverage"):
        for number in range(topology.cp_size):
            if held[number] < len(places) / topology.cp_size:
                say.fail(
                    "cp.coverage",
                    f"{held[number]} of {len(places)} ranks are context-parallel rank {number} of "
                    f"{topology.cp_size}, expected as many of each",
                    cp_rank=number,
                )
    for one in sorted(trace.passes):
        if one.stage not in policy.stages:
            continue
        # Shards are recorded of the first micro-batches of a pass, assignments of all.
        count = max(trace.assigned_in(one).values(), default=capped)
        place = min(places[one.rank])[0] if one.rank in places else None
        shown = "" if place is None else f" (context-parallel rank {place})"
        for number in range(1, max(1, min(capped, count)) + 1):
            if one.rank not in trace.shards[Batch(one.stage, one.step, number)]:
                say.fail(
                    "cp.coverage",
                    f"rank {one.rank}{shown} has no shard of micro-batch {number} in {one.stage} "
                    f"at step {one.step}",
                    stage=one.stage,
                    trace_step=one.step,
                    microbatch=number,
                    rank=one.rank,
                    cp_rank=place,
                )


def cells_of(trace: Trace, policy: RoutePolicy) -> list[Cell]:
    """Every layer of a stated stage that was assigned, in order."""
    return sorted(
        cell
        for cell, replays in trace.replays.items()
        if cell.stage in policy.stages and replays.assigned
    )

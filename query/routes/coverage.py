"""Whether every stage, rank, layer and micro-batch that should have records has them."""

from __future__ import annotations

from collections import Counter

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.topology import Topology
from trajreplay.query.routes.trace import Batch, Cell, Pass, Trace


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
        for step in trace.steps[stage]:
            _check_ranks(stage, step, trace, topology, say)
            _check_counts(stage, step, trace, topology, say)
    _check_layers(trace, topology, policy, say)
    _check_shards(trace, topology, policy, say)


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
    """Every layer of a rank is assigned once a micro-batch, whose shards may be capped."""
    for rank in trace.world:
        one = Pass(stage, step, rank)
        counts = trace.assigned_in(one)
        block = topology.block_of(rank)
        peers = [Pass(stage, step, peer) for peer in block.ranks] if block else [one]
        most = max((max(trace.assigned_in(peer).values(), default=0) for peer in peers), default=0)
        most = max([most, *trace.shards_of(one)])
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


def _check_layers(
    trace: Trace, topology: Topology, policy: RoutePolicy, say: RouteFindings
) -> None:
    stated = set(policy.layers)
    for layer in sorted(set(trace.layers) - stated) if stated else ():
        say.fail("layer.coverage", f"layer {layer} is replayed, the policy has none", layer=layer)
    for layer in sorted(stated - set(trace.layers)):
        say.fail("layer.coverage", f"no rank replays layer {layer} of the policy", layer=layer)
    indices: dict[int, set[int]] = {}
    width = 0
    for replays in trace.replays.values():
        for assigned in replays.assigned:
            indices.setdefault(assigned.layer, set()).add(assigned.payload_idx)
    for shards in trace.shards.values():
        for shard in shards.values():
            width = max(width, shard.routes.shape[2] if len(shard.routes.shape) == 4 else 0)
    for layer, found in sorted(indices.items()):
        if len(found) > 1:
            say.fail(
                "layer.coverage",
                f"layer {layer} reads payload layers {', '.join(map(str, sorted(found)))}",
                layer=layer,
            )
    _check_payload_layers(
        {layer: min(found) for layer, found in indices.items()}, width, stated, say
    )
    known = say.has_failed("layer.coverage", "rank.coverage", "assign.coverage")
    if topology.blocks and not topology.replicas and not known:
        _check_pipelines(topology, say)
    elif not topology.blocks and trace.layers and not known:
        say.unverified(
            "layer.coverage",
            "ranks are not numbered as Megatron numbers them: whether those of a replica together "
            "have every layer is not known",
        )
    _check_idle(trace, topology, say)


def _check_payload_layers(
    index: dict[int, int], width: int, stated: set[int], say: RouteFindings
) -> None:
    """A payload of MoE layers only is used whole; one of all layers shows its dense ones too."""
    if not index or not width:
        return
    layers = sorted(index)
    if [index[layer] for layer in layers] != sorted(set(index.values())):
        say.fail("layer.coverage", "layers do not read payload layers in their own order")
    missing = sorted(set(range(width)) - set(index.values()))
    if not missing or stated:
        return
    if any(index[layer] != layer - 1 for layer in layers):
        say.fail(
            "layer.coverage",
            f"no layer reads payload layer {', '.join(map(str, missing))} of {width}",
        )
    else:
        say.unverified(
            "layer.coverage",
            f"{len(missing)} of {width} payload layers are read by no layer: dense ones, or MoE "
            "layers that nobody replays; the policy's layers would tell",
        )


def _check_pipelines(topology: Topology, say: RouteFindings) -> None:
    counts = Counter(block.layers for block in topology.blocks if block.layers)
    shown = "; ".join(
        f"layers {', '.join(map(str, sorted(layers)))}: {count}" for layers, count in counts.items()
    )
    most = frozenset().union(*counts)
    for block in topology.blocks:
        wider = [layers for layers in counts if layers > block.layers]
        for layer in sorted(frozenset().union(*wider) - block.layers) if block.layers else ():
            say.fail(
                "layer.coverage",
                f"ranks {', '.join(map(str, block.ranks))} do not replay layer {layer}, others "
                "with their layers do",
                rank=block.ranks[0],
                layer=layer,
            )
    if not say.has_failed("layer.coverage"):
        say.fail(
            "layer.coverage",
            f"groups of ranks do not divide {len(most)} layers into equal pipelines: {shown}",
        )


def _check_idle(trace: Trace, topology: Topology, say: RouteFindings) -> None:
    """Ranks without any layer are a dense pipeline stage only if they work on others' batches."""
    busy = {rank for rank, layers in trace.layers_of.items() if layers}
    contents = {
        (batch, shard.routes.sha256)
        for batch, shards in trace.shards.items()
        for rank, shard in shards.items()
        if rank in busy
    }
    for rank in trace.world:
        block = topology.block_of(rank)
        if rank in busy or (block and block.layers):
            continue
        own = {
            (batch, shards[rank].routes.sha256)
            for batch, shards in trace.shards.items()
            if rank in shards
        }
        if own and own <= contents:
            say.remark("layer.coverage", f"rank {rank} has no MoE layer", rank=rank)
        elif own:
            say.fail("layer.coverage", f"rank {rank} replays no layer", rank=rank)


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

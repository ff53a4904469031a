"""Whether the MoE layers that there are, are replayed, each from its own layer of the payload."""

from __future__ import annotations

from collections import Counter

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.topology import Topology
from trajreplay.query.routes.trace import Trace


def check_layers(trace: Trace, topology: Topology, policy: RoutePolicy, say: RouteFindings) -> None:
    """Check layers that the policy states, those of the payload, of replicas and of idle ranks."""
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

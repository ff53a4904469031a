"""Whether the routes assigned to layers are those of the shard, and shards those of the payload.

Hashes of one tensor say nothing about its slices. Where previews hold whole layers, shards and
samples are put together from them and hashed again; else what previews show is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trajreplay.query.routes.fetched import Share
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.payloads import (
    Matched,
    Put,
    Rows,
    gathered,
    match_samples,
    sha256_of,
    tokens_of,
)
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.shards import Held
from trajreplay.query.routes.topology import Block, Topology
from trajreplay.query.routes.trace import Batch, Cell, Trace
from trajreplay.schema.bundles.r3.records import Assignment, Shard


def check_installed(
    trace: Trace,
    topology: Topology,
    held: list[Held],
    shares: Sequence[Share],
    policy: RoutePolicy,
    say: RouteFindings,
) -> tuple[list[Put], dict[int, Matched]]:
    """Check assignments against shards, shards of a pipeline against one another, and payloads.

    Returns:
        The samples that could be put together, and what they are of what was fetched.
    """
    put: list[Put] = []
    by_place = {(one.batch, one.block.ranks): one for one in held}
    unknown = checked = strange = 0
    is_queue = policy.contract == "transfer-queue"
    for one in held:
        for place, shard in enumerate(one.shards):
            _check_shown(trace, one, place, shard, say)
    for replica in topology.replicas:
        ranks = frozenset(rank for block in replica for rank in block.ranks)
        for one in held:
            if one.block is not replica[0]:
                continue
            others = [by_place.get((one.batch, block.ranks)) for block in replica[1:]]
            _check_pipeline(one, [other for other in others if other], say)
            whole = [
                _whole_shard(trace, one, replica, place, shard, say)
                for place, shard in enumerate(one.shards)
            ]
            known = [rows for rows in whole if rows is not None]
            checked += 1
            strange += is_queue and one.share is None
            if len(known) < len(whole):
                unknown += 1
                continue
            routes, tokens = gathered(one, known), gathered(one, tokens_of(one))
            unknown += is_queue and one.composition is None
            put += [
                Put(one, ranks, tuple(tokens[number]) if tokens else (), tuple(rows))
                for number, rows in enumerate(routes)
            ]
    matched = match_samples(shares, put, say)
    if held and not topology.replicas:
        say.unverified("installed.payload", "groups of ranks do not divide into equal pipelines")
    elif unknown:
        say.unverified(
            "installed.payload",
            f"{unknown} of {checked} micro-batches: previews do not hold whole tensors",
        )
    if strange:
        for rule in ("installed.payload", "cp.reassembly"):
            say.unverified(
                rule,
                f"{strange} of {checked} micro-batches: the traces hold nothing that was fetched "
                "for them",
            )
    return put, matched


def assigned_of(
    trace: Trace, batch: Batch, ranks: Iterable[int], layer: int
) -> list[Assignment] | None:
    """What the tensor ranks of a shard assigned to a layer for a micro-batch, in order."""
    found = []
    for rank in ranks:
        cell = trace.replays.get(Cell(batch.stage, batch.step, rank, layer))
        if cell is None or len(cell.assigned) < batch.microbatch:
            return None
        found.append(cell.assigned[batch.microbatch - 1])
    return found


def _check_shown(trace: Trace, one: Held, place: int, shard: Shard, say: RouteFindings) -> None:
    """Compare what the previews of a shard and of its assignments both show; check their shapes."""
    if len(shard.routes.shape) != 4:
        return
    batch, rows, layers, top_k = shard.routes.shape
    shown = shard.routes.preview
    for number, rank in enumerate(one.block.at(place)):
        for layer in sorted(trace.layers_of[rank]):
            for assigned in assigned_of(trace, one.batch, [rank], layer) or []:
                where = {
                    "stage": one.batch.stage,
                    "trace_step": one.batch.step,
                    "microbatch": one.batch.microbatch,
                    "rank": rank,
                    "layer": layer,
                }
                shape, index = assigned.routes.shape, assigned.payload_idx
                split = shape and shape[0] and batch * rows == shape[0] * one.block.tensor
                if shape != (batch * rows, top_k) and not (split and shape[1:] == (top_k,)):
                    say.fail(
                        "tensor.shape",
                        f"rank {rank} assigned routes {list(shape)} to layer {layer}, its shard is "
                        f"{list(shard.routes.shape)}",
                        **where,
                    )
                    continue
                if index >= layers:
                    say.fail(
                        "tensor.shape",
                        f"layer {layer} reads payload layer {index} of {layers}",
                        **where,
                    )
                    continue
                first = number * shape[0] if shape[0] < batch * rows else 0
                for offset, row in enumerate(assigned.routes.rows):
                    source = source_row(first + offset, batch, rows)
                    start = (source * layers + index) * top_k
                    seen = shown[start : start + top_k]
                    if seen != row[: len(seen)]:
                        say.fail(
                            "installed.payload",
                            f"rank {rank} assigned {list(row)} to row {offset} of layer {layer} in "
                            f"micro-batch {one.batch.microbatch} of {one.batch.stage}, its shard "
                            f"has {list(seen)}",
                            **where,
                        )
                        break


def source_row(row: int, batch: int, rows: int) -> int:
    """The row of a shard that a router's row is: Megatron lays out positions before samples."""
    return row if batch == 1 else row % batch * rows + row // batch


def _check_pipeline(one: Held, others: list[Held], say: RouteFindings) -> None:
    """Pipeline stages of a replica work on the same micro-batch."""
    for other in others:
        for shard, peer in zip(one.shards, other.shards, strict=True):
            if shard.routes.sha256 != peer.routes.sha256:
                say.fail(
                    "installed.payload",
                    f"ranks {shard.origin.rank} and {peer.origin.rank} are of one pipeline and "
                    f"hold other routes of micro-batch {one.batch.microbatch} in {one.batch.stage}",
                    stage=one.batch.stage,
                    trace_step=one.batch.step,
                    microbatch=one.batch.microbatch,
                    rank=peer.origin.rank,
                    cp_rank=peer.cp_rank,
                )
            elif not _may_be_alike(shard, peer):
                say.fail(
                    "cp.reassembly",
                    f"ranks {shard.origin.rank} and {peer.origin.rank} are of one pipeline and "
                    f"hold other tokens of micro-batch {one.batch.microbatch} in {one.batch.stage}",
                    stage=one.batch.stage,
                    trace_step=one.batch.step,
                    microbatch=one.batch.microbatch,
                    rank=peer.origin.rank,
                    cp_rank=peer.cp_rank,
                )


def _may_be_alike(shard: Shard, peer: Shard) -> bool:
    """Whether identities and tokens are equal, where both were recorded."""
    pairs = ((shard.identity, peer.identity), (shard.input_ids, peer.input_ids))
    return all(one.sha256 == other.sha256 for one, other in pairs if one and other)


def _whole_shard(
    trace: Trace,
    one: Held,
    replica: tuple[Block, ...],
    place: int,
    shard: Shard,
    say: RouteFindings,
) -> Rows | None:
    """The routes of a shard by row, layers side by side; None where previews do not hold them."""
    if len(shard.routes.shape) != 4:
        return None
    batch, rows, layers, top_k = shard.routes.shape
    if shard.routes.is_whole:
        values = shard.routes.preview
        width = layers * top_k
        return [values[start : start + width] for start in range(0, len(values), width)]
    by_index: dict[int, Rows] = {}
    for block in replica:
        for layer in block.layers:
            column = _column(trace, one, block.at(place), layer, batch * rows)
            if column is None or len(column[1]) != batch * rows:
                return None
            by_index[column[0]] = column[1]
    if not by_index or max(by_index) >= layers:
        return None
    # Dense layers of a payload that has all layers hold zeros.
    blank: Rows = [(0,) * top_k] * (batch * rows)
    whole: Rows = [()] * (batch * rows)
    for row in range(batch * rows):
        picked = [by_index.get(index, blank)[row] for index in range(layers)]
        whole[source_row(row, batch, rows)] = tuple(value for cell in picked for value in cell)
    if sha256_of(whole, shard.routes) == shard.routes.sha256:
        return whole
    if len(by_index) == layers and not say.has_failed("installed.payload"):
        say.fail(
            "installed.payload",
            f"the layers assigned to context-parallel rank {place} (rank {shard.origin.rank}) for "
            f"micro-batch {one.batch.microbatch} of {one.batch.stage} are not those of its shard",
            stage=one.batch.stage,
            trace_step=one.batch.step,
            microbatch=one.batch.microbatch,
            rank=shard.origin.rank,
            cp_rank=place,
        )
    return None


def _column(
    trace: Trace, one: Held, ranks: tuple[int, ...], layer: int, rows: int
) -> tuple[int, Rows] | None:
    """One layer of a shard, and the payload layer it is read from."""
    assigned = assigned_of(trace, one.batch, ranks, layer)
    if not assigned or not all(
        piece.routes.is_whole and len(piece.routes.shape) == 2 for piece in assigned
    ):
        return None
    if assigned[0].routes.shape[0] == rows:
        assigned = assigned[:1]
    return assigned[0].payload_idx, [row for piece in assigned for row in piece.routes.rows]

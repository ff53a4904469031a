"""Whether the routes assigned to layers are those of the shard, and shards those of the payload.

Hashes of one tensor say nothing about its slices. Where previews hold whole layers, shards and
samples are put together from them and hashed again; else what previews show is compared.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.replays import rows_of
from trajreplay.query.routes.shards import Held
from trajreplay.query.routes.topology import Block, Topology
from trajreplay.query.routes.trace import Batch, Cell, Trace
from trajreplay.schema.bundles.r3.records import Assignment, PayloadSample, Shard, TensorRecord

Rows: TypeAlias = list[tuple[int, ...]]
_TOKENS = "cp.reassembly"
_CODES = {"int8": "b", "uint8": "B", "int16": "h", "int32": "i", "int64": "q"}


@dataclass(frozen=True)
class Put:
    """A sample put together again from the shards of a micro-batch.

    Args:
        batch: The micro-batch.
        ranks: All ranks of the replica that replays it.
        tokens: By position.
        routes: By position, layers side by side.
    """

    batch: Batch
    ranks: frozenset[int]
    tokens: tuple[tuple[int, ...], ...]
    routes: tuple[tuple[int, ...], ...]


def check_installed(
    trace: Trace, topology: Topology, held: list[Held], say: RouteFindings
) -> list[Put]:
    """Check assignments against shards, shards of a pipeline against one another, and payloads.

    Returns:
        The samples that could be put together.
    """
    put: list[Put] = []
    by_place = {(one.batch, one.block.ranks): one for one in held}
    unknown = checked = 0
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
            if len(known) < len(whole):
                unknown += 1
                continue
            routes, tokens = _gathered(one, known), _gathered(one, _tokens(one))
            unknown += one.composition is None and bool(one.fetched)
            _check_samples(one, routes, tokens, say)
            put += [
                Put(one.batch, ranks, tuple(ids), tuple(rows))
                for ids, rows in zip(tokens, routes, strict=False)
            ]
    if held and not topology.replicas:
        say.unverified("installed.payload", "groups of ranks do not divide into equal pipelines")
    elif unknown:
        say.unverified(
            "installed.payload",
            f"{unknown} of {checked} micro-batches: previews do not hold whole tensors",
        )
    return put


def _assigned(trace: Trace, one: Held, ranks: Iterable[int], layer: int) -> list[Assignment] | None:
    """What the tensor ranks of a shard assigned to a layer for this micro-batch, in order."""
    found = []
    for rank in ranks:
        cell = trace.replays.get(Cell(one.batch.stage, one.batch.step, rank, layer))
        if cell is None or len(cell.assigned) < one.batch.microbatch:
            return None
        found.append(cell.assigned[one.batch.microbatch - 1])
    return found


def _check_shown(trace: Trace, one: Held, place: int, shard: Shard, say: RouteFindings) -> None:
    """Compare what the previews of a shard and of its assignments both show; check their shapes."""
    if len(shard.routes.shape) != 4:
        return
    batch, rows, layers, top_k = shard.routes.shape
    shown = shard.routes.preview
    for number, rank in enumerate(one.block.at(place)):
        for layer in sorted(trace.layers_of[rank]):
            for assigned in _assigned(trace, one, [rank], layer) or []:
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
                for offset, row in enumerate(rows_of(assigned.routes)):
                    source = _source_row(first + offset, batch, rows)
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


def _source_row(row: int, batch: int, rows: int) -> int:
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
        whole[_source_row(row, batch, rows)] = tuple(value for cell in picked for value in cell)
    if _sha256(whole, shard.routes) == shard.routes.sha256:
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
    assigned = _assigned(trace, one, ranks, layer)
    if not assigned or not all(piece.routes.is_whole for piece in assigned):
        return None
    if assigned[0].routes.shape[0] == rows:
        assigned = assigned[:1]
    return assigned[0].payload_idx, [row for piece in assigned for row in rows_of(piece.routes)]


def _check_samples(one: Held, routes: list[Rows], tokens: list[Rows], say: RouteFindings) -> None:
    """Hash what was put together, and look for a fetched sample of that length with the hashes."""
    wrong = {(found.where.get("stage"), found.where.get("key")) for found in say.found}
    used: set[int] = set()
    lengths = one.composition.lengths if one.composition and one.fetched else ()
    for number, length in enumerate(lengths):
        alike = [
            (place, payload)
            for place, payload in enumerate(one.fetched)
            if payload.valid_length == length and place not in used
        ]
        of_tokens = [
            (place, payload)
            for place, payload in alike
            if not tokens
            or payload.input_ids is None
            or payload.input_ids.sha256 == _sha256(tokens[number], payload.input_ids)
        ]
        found = [
            place
            for place, payload in of_tokens
            if payload.routed_experts.sha256 == _sha256(routes[number], payload.routed_experts)
        ]
        if found:
            used.add(found[0])
        elif any((one.batch.stage, payload.key) in wrong for _, payload in alike):
            continue  # it is no measure: fetch.hash says so
        elif of_tokens:
            _say_sample(one, of_tokens[0][1], "routes", "installed.payload", say)
        else:
            _say_sample(one, (alike or list(enumerate(one.fetched)))[0][1], "tokens", _TOKENS, say)


def _tokens(one: Held) -> list[Rows] | None:
    """The tokens of each shard, a row each; None where previews do not hold all of them."""
    found = [shard.input_ids for shard in one.shards]
    whole = [ids for ids in found if ids is not None and ids.is_whole]
    if len(whole) < len(found):
        return None
    return [[(value,) for value in ids.preview] for ids in whole]


def _gathered(one: Held, shards: list[Rows] | None) -> list[Rows]:
    """The rows of each sample of a micro-batch, in order of position; none where not known."""
    composition = one.composition
    if composition is None or shards is None:
        return []
    found: list[Rows] = [[()] * length for length in composition.lengths]
    for place, rows in enumerate(shards):
        for (sample, position, valid), row in zip(
            composition.rows(place, len(shards)), rows, strict=True
        ):
            if valid:
                found[sample][position] = row
    return found


def _say_sample(
    one: Held, payload: PayloadSample, what: str, rule: str, say: RouteFindings
) -> None:
    say.fail(
        rule,
        f"the shards of micro-batch {one.batch.microbatch} of {one.batch.stage} put together are "
        f"other {what} than those fetched of sample {payload.sample_idx}",
        stage=one.batch.stage,
        trace_step=one.batch.step,
        microbatch=one.batch.microbatch,
        sample_idx=payload.sample_idx,
        key=payload.key,
    )


def _sha256(rows: Rows, like: TensorRecord) -> str | None:
    """The hash of rows as a trace takes it of a tensor of that dtype."""
    try:
        values = array(_CODES[like.dtype], (value for row in rows for value in row))
    except OverflowError:
        return None
    return hashlib.sha256(values.tobytes()).hexdigest()

"""Whether tensors of one kind have one dtype, on whatever rank and in whatever stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.trace import Trace
from trajreplay.schema.bundles.r3.records import Action, Assignment, TensorRecord, TraceRecord

_SIGNED = ("int8", "int16", "int32", "int64")  # of routes, since -1 is a row without one
_SHARDS = "routes of shards"
_LAYERS = "routes assigned and installed"


def check_dtypes(trace: Trace, say: RouteFindings) -> None:
    """Check the dtypes of shards, and of what layers are assigned and install.

    Hashes are over the bytes of a tensor in its own dtype, so that tensors of another dtype are
    compared with nothing. On a queue shards have the dtype of the payload that they are cut from.
    """
    found: dict[str, Counter[str]] = {}
    first: dict[tuple[str, str], TraceRecord] = {}
    for kind, record, tensor in _tensors(trace):
        found.setdefault(kind, Counter())[tensor.dtype] += 1
        first.setdefault((kind, tensor.dtype), record)
    put = sorted({one.routed_experts.dtype for one in trace.payloads})
    for kind, counts in found.items():
        usual = put[0] if kind == _SHARDS and len(put) == 1 else counts.most_common(1)[0][0]
        of_routes = kind in (_SHARDS, _LAYERS)
        for dtype in counts:
            if dtype == usual and (not of_routes or dtype in _SIGNED):
                continue
            record = first[kind, dtype]
            expected = usual if dtype != usual else f"one of {', '.join(_SIGNED)}"
            say.fail(
                "tensor.shape",
                f"{record.origin.file}, line {record.origin.line}: {counts[dtype]} {kind} are "
                f"{dtype}, expected {expected}",
                file=record.origin.file,
                line=record.origin.line,
                rank=record.origin.rank,
            )
    _check_sizes(trace, say)


def _check_sizes(trace: Trace, say: RouteFindings) -> None:
    """Tensors of one hash have as many bytes: what compares hashes compares no dtypes."""
    first: dict[str, tuple[int, TraceRecord]] = {}
    for record, tensor in all_tensors(trace):
        size = tensor.size_bytes
        before, place = first.setdefault(tensor.sha256, (size, record))
        if size == before or say.has_failed("tensor.shape"):
            continue
        say.fail(
            "tensor.shape",
            f"{record.origin.file}, line {record.origin.line}: {tensor.dtype} {list(tensor.shape)} "
            f"is {size} bytes, and {before} in a tensor of the same hash in {place.origin.file}, "
            f"line {place.origin.line}",
            file=record.origin.file,
            line=record.origin.line,
            rank=record.origin.rank,
        )


def all_tensors(trace: Trace) -> Iterator[tuple[TraceRecord, TensorRecord]]:
    """Every tensor that some rule compares, with its record."""
    for payload in trace.payloads:
        yield payload, payload.routed_experts
        if payload.input_ids is not None:
            yield payload, payload.input_ids
    for _, record, tensor in _tensors(trace):
        yield record, tensor
    for replays in trace.replays.values():
        for one in (*replays.verified, *replays.verified_backward):
            if one.expected is None:
                yield one, one.actual
            elif one.expected.shape == one.actual.shape:  # else verify.contradiction says so
                yield one, one.actual
                yield one, one.expected


def _tensors(trace: Trace) -> Iterator[tuple[str, TraceRecord, TensorRecord]]:
    for shards in trace.shards.values():
        for shard in shards.values():
            yield _SHARDS, shard, shard.routes
            if shard.identity is not None:
                yield "token identities", shard, shard.identity
            if shard.input_ids is not None:
                yield "tokens of shards", shard, shard.input_ids
    for replays in trace.replays.values():
        layers: list[Assignment | Action] = [*replays.assigned, *replays.forward]
        for one in (*layers, *replays.backward):
            if one.routes is not None:
                yield _LAYERS, one, one.routes

"""Single defects of router-replay traces: what each does to a healthy one, and what it breaks."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.helpers.r3_traces import Layout, Record, Trace, coordinates, make_trace, tensor_record

_REPLAY = ("router_replay_assignment", "router_replay_action", "router_replay_forward_verify")
_PASSES = (*_REPLAY, "cp_routed_experts")


@dataclass(frozen=True)
class Defect:
    """One defect.

    Args:
        name: In words.
        rules: Those that may be named; one of them has to be.
        apply: Puts it into a trace.
        needs: Whether a layout can have it.
    """

    name: str
    rules: frozenset[str]
    apply: Callable[[Trace], None]
    needs: Callable[[Layout], bool] = lambda _: True


DEFECTS: list[Defect] = []


def defect(
    name: str, *rules: str, needs: Callable[[Layout], bool] = lambda _: True
) -> Callable[[Callable[[Trace], None]], Callable[[Trace], None]]:
    """Declare a defect."""

    def declare(apply: Callable[[Trace], None]) -> Callable[[Trace], None]:
        DEFECTS.append(Defect(name, frozenset(rules), apply, needs))
        return apply

    return declare


def queue(layout: Layout) -> bool:
    return layout.queue


def legacy(layout: Layout) -> bool:
    return not layout.queue


def both_stages(layout: Layout) -> bool:
    return len(layout.stages) == 2


def several_ranks(layout: Layout) -> bool:
    return layout.world > 1


def last(trace: Trace, **fields: Any) -> Record:
    return list(trace.records(**fields))[-1]


def spoil(tensor: Record, by: int = 1) -> None:
    """Change the hash of a tensor, and its values where they are shown."""
    prefix = "valid_" if "valid_sha256" in tensor else ""
    name = f"{prefix}sha256"
    tensor[name] = hashlib.sha256(f"{tensor[name]} {by}".encode()).hexdigest()


@defect("a record lacks its layer", "trace.record")
def _(trace: Trace) -> None:
    del last(trace, event="router_replay_assignment")["layer_number"]


@defect("an event is not known", "trace.record")
def _(trace: Trace) -> None:
    last(trace, event="router_replay_action")["event"] = "router_replay_reaction"


@defect("a rank has two processes", "trace.one_attempt")
def _(trace: Trace) -> None:
    name = list(trace.files)[-1]
    trace.files[f"again_{name}"] = [one | {"pid": 77} for one in trace.files[name]]


@defect("an earlier attempt wrote to the same file", "trace.one_attempt")
def _(trace: Trace) -> None:
    for name, records in trace.files.items():
        early = [one | {"time": one["time"] - 900} for one in records]
        trace.files[name] = [*early, *records]


@defect("an earlier attempt stopped after its first pass", "trace.one_attempt")
def _(trace: Trace) -> None:
    for name, records in trace.files.items():
        first = next((n for n, one in enumerate(records) if one.get("stage") == "train"), 0)
        cut = [one | {"time": one["time"] - 900} for one in records[: first or 1]]
        trace.files[name] = [*cut, *records]


@defect("a record is of a job of another size", "trace.one_attempt")
def _(trace: Trace) -> None:
    last(trace, rank=0)["world_size"] = 640


@defect("the reference replays", "stage.forbidden")
def _(trace: Trace) -> None:
    for name, records in trace.files.items():
        extra = [
            one | {"stage": "reference-logprob"}
            for one in records
            if one.get("stage") == "train" and one["event"] in _REPLAY
        ]
        trace.files[name] = records + extra


@defect("legacy traces have producers", "contract.mixed", needs=legacy)
def _(trace: Trace) -> None:
    other = make_trace(replace(trace.layout, queue=True))
    trace.files["producer.jsonl"] = other.files["r3_trace_node_pid1000.jsonl"]


@defect("legacy traces have fetches", "contract.mixed", needs=legacy)
def _(trace: Trace) -> None:
    other = make_trace(replace(trace.layout, queue=True))
    name = list(trace.files)[-1]
    fetched = [one for one in other.files[name] if one["event"] == "tq_fetch_sample"]
    trace.files[name] = fetched + trace.files[name]


@defect("a rank left no trace", "rank.coverage", "fetch.coverage", needs=several_ranks)
def _(trace: Trace) -> None:
    del trace.files[list(trace.files)[-1]]


@defect(
    "a rank left none in train",
    "rank.coverage",
    needs=lambda one: several_ranks(one) and both_stages(one),
)
def _(trace: Trace) -> None:
    rank = trace.layout.world - 1
    for event in (*_REPLAY, "cp_routed_experts"):
        trace.remove(rank=rank, stage="train", event=event)


@defect("a stage is not traced", "assign.coverage", "fetch.coverage", needs=both_stages)
def _(trace: Trace) -> None:
    for stage in ("prev-logprob", "prev_lp"):
        trace.remove(stage=stage)


def several_steps(layout: Layout) -> bool:
    return both_stages(layout) and layout.steps > 1


def remove_replays(trace: Trace, stage: str, step: int) -> None:
    """Remove what a stage replayed in a step; what it fetched stays."""
    for event in (*_REPLAY, "cp_routed_experts"):
        trace.remove(stage=stage, trace_step=step, event=event)


@defect("train never replayed the last step", "assign.coverage", needs=several_steps)
def _(trace: Trace) -> None:
    remove_replays(trace, "train", trace.layout.steps)


@defect(
    "train never replayed the last step, nor fetched for it",
    "assign.coverage",
    "fetch.coverage",
    needs=several_steps,
)
def _(trace: Trace) -> None:
    remove_replays(trace, "train", trace.layout.steps)
    trace.remove(stage="train", trace_step=trace.layout.steps)


@defect("train never replayed the first step", "assign.coverage", needs=several_steps)
def _(trace: Trace) -> None:
    remove_replays(trace, "train", 1)


@defect(
    "prev-logprob never replayed the first step",
    "assign.coverage",
    "stage.routes",
    needs=several_steps,
)
def _(trace: Trace) -> None:
    remove_replays(trace, "prev-logprob", 1)


@defect(
    "a step between others was never replayed", "assign.coverage", needs=lambda one: one.steps > 2
)
def _(trace: Trace) -> None:
    for stage in trace.layout.stages:
        remove_replays(trace, stage, 2)


def remove_microbatch(trace: Trace, stage: str, number: int, ranks: Container[object]) -> None:
    """Remove all that some ranks replayed of one micro-batch; what they fetched stays."""
    for name, records in trace.files.items():
        kept, seen = [], Counter[object]()
        for one in records:
            if one.get("stage") == stage and one.get("rank") in ranks and one["event"] in _PASSES:
                kind = [one.get(key) for key in ("event", "action", "layer_number", "trace_step")]
                seen[tuple(kind)] += 1
                if one.get("microbatch_idx", seen[tuple(kind)]) == number:
                    continue
            kept.append(one)
        trace.files[name] = kept


def batches(layout: Layout) -> int:
    """Micro-batches of a step in train."""
    return -(-len(layout.lengths) // layout.microbatch)


def several_batches(layout: Layout) -> bool:
    return batches(layout) > 1


@defect(
    "no rank replayed a micro-batch in train",
    "assign.coverage",
    needs=lambda one: queue(one) and several_batches(one),
)
def _(trace: Trace) -> None:
    remove_microbatch(trace, "train", batches(trace.layout), range(trace.layout.world))


@defect(
    "no rank replayed a micro-batch in prev-logprob",
    "assign.coverage",
    needs=lambda one: queue(one) and both_stages(one) and several_batches(one),
)
def _(trace: Trace) -> None:
    remove_microbatch(trace, "prev-logprob", batches(trace.layout), range(trace.layout.world))


@defect(
    "a pipeline stage did not replay a micro-batch in train",
    "assign.count",
    needs=lambda one: one.pipeline > 1 and several_batches(one),
)
def _(trace: Trace) -> None:
    of = trace.layout
    ranks = [rank for rank in range(of.world) if coordinates(of, rank)[3] == of.pipeline - 1]
    remove_microbatch(trace, "train", batches(trace.layout), ranks)


@defect(
    "a data-parallel replica did not replay a micro-batch in train",
    "assign.coverage",
    needs=lambda one: queue(one) and one.data > 1 and several_batches(one),
)
def _(trace: Trace) -> None:
    of = trace.layout
    ranks = [rank for rank in range(of.world) if coordinates(of, rank)[2] == of.data - 1]
    remove_microbatch(trace, "train", batches(trace.layout), ranks)


@defect(
    "no rank replayed a micro-batch in train, of which no shard is recorded",
    "assign.coverage",
    needs=lambda one: queue(one) and batches(one) > one.capped,
)
def _(trace: Trace) -> None:
    remove_microbatch(trace, "train", batches(trace.layout), range(trace.layout.world))


@defect("there is no producer", "producer.coverage", needs=queue)
def _(trace: Trace) -> None:
    trace.remove(event="rollout_payload_sample")


@defect("a key was put again with other routes", "producer.duplicate", needs=queue)
def _(trace: Trace) -> None:
    again = copy.deepcopy(last(trace, event="rollout_payload_sample"))
    again["trace_step"] += 1
    spoil(again["routed_experts"])
    trace.files[next(iter(trace.files))].append(again)


@defect("a producer lacks the tokens", "producer.input_ids", needs=queue)
def _(trace: Trace) -> None:
    del last(trace, event="rollout_payload_sample")["input_ids"]


@defect("a key is never fetched for a stage", "fetch.coverage", needs=queue)
def _(trace: Trace) -> None:
    key = last(trace, event="rollout_payload_sample")["key"]
    trace.remove(event="tq_fetch_sample", key=key, stage="train")


@defect(
    "a rank did not fetch a key",
    "fetch.coverage",
    needs=lambda one: one.queue and one.world > one.data and len(one.lengths) > 1,
)
def _(trace: Trace) -> None:
    key = last(trace, event="tq_fetch_sample", rank=0)["key"]
    trace.remove(event="tq_fetch_sample", key=key, rank=0)


@defect("a fetched sample has other routes", "fetch.hash", needs=queue)
def _(trace: Trace) -> None:
    spoil(last(trace, event="tq_fetch_sample")["routed_experts"])


@defect("a fetched sample has other tokens", "fetch.hash", needs=queue)
def _(trace: Trace) -> None:
    spoil(last(trace, event="tq_fetch_sample")["input_ids"])


@defect("a fetched sample has another length", "fetch.hash", "tensor.shape", needs=queue)
def _(trace: Trace) -> None:
    last(trace, event="tq_fetch_sample")["valid_length"] -= 1


@defect("a fetched sample has another dtype", "fetch.hash", "tensor.shape", needs=queue)
def _(trace: Trace) -> None:
    last(trace, event="tq_fetch_sample")["routed_experts"]["dtype"] = "torch.int32"


@defect("a fetched sample lacks its tokens", "fetch.hash", needs=queue)
def _(trace: Trace) -> None:
    del last(trace, event="tq_fetch_sample")["input_ids"]


def _layer(trace: Trace) -> tuple[int, int]:
    """The last rank that has layers, and the last of those."""
    one = last(trace, event="router_replay_assignment")
    return one["rank"], one["layer_number"]


@defect(
    "a rank does not replay a layer in train",
    "layer.coverage",
    needs=lambda one: both_stages(one) and len(one.layers) >= 2 * one.pipeline,
)
def _(trace: Trace) -> None:
    rank, layer = _layer(trace)
    trace.remove(rank=rank, layer_number=layer, stage="train")


@defect(
    "a rank does not replay a layer that its peers replay",
    "layer.coverage",
    needs=lambda one: one.data * one.context > 1 and len(one.layers) >= 2 * one.pipeline,
)
def _(trace: Trace) -> None:
    rank, layer = _layer(trace)
    trace.remove(rank=rank, layer_number=layer)


@defect(
    "nobody replays a layer",
    "layer.coverage",
    needs=lambda one: not one.full and one.layers[0] > 1 and len(one.layers) >= 2 * one.pipeline,
)
def _(trace: Trace) -> None:
    trace.remove(layer_number=_layer(trace)[1])


@defect(
    "an assignment of a micro-batch is missing",
    "assign.count",
    "action.coverage",
    needs=lambda one: len(one.lengths) > one.microbatch,
)
def _(trace: Trace) -> None:
    remove(trace, last(trace, event="router_replay_assignment", stage="train"))


def remove(trace: Trace, record: Record) -> None:
    for name, records in trace.files.items():
        trace.files[name] = [one for one in records if one is not record]


@defect("a forward was not set to replay", "action.coverage")
def _(trace: Trace) -> None:
    remove(trace, last(trace, action="replay_forward", event="router_replay_action"))


@defect("a backward was not set to replay", "backward.count")
def _(trace: Trace) -> None:
    remove(trace, last(trace, action="replay_backward", event="router_replay_action"))


@defect("no backward replays", "backward.count")
def _(trace: Trace) -> None:
    trace.remove(action="replay_backward", event="router_replay_action")


@defect("a backward replays twice", "backward.count")
def _(trace: Trace) -> None:
    name = list(trace.files)[-1]
    trace.files[name].append(
        dict(last(trace, action="replay_backward", event="router_replay_action"))
    )


@defect("prev-logprob replays backward", "backward.count", needs=both_stages)
def _(trace: Trace) -> None:
    one = last(trace, event="router_replay_action", stage="prev-logprob")
    name = list(trace.files)[-1]
    number = trace.files[name].index(one)
    trace.files[name].insert(number + 1, one | {"action": "replay_backward"})


@defect("no forward of a stage was verified", "verify.coverage")
def _(trace: Trace) -> None:
    trace.remove(event="router_replay_forward_verify", stage="train")


@defect("a layer was not verified", "verify.coverage")
def _(trace: Trace) -> None:
    rank, layer = _layer(trace)
    trace.remove(event="router_replay_forward_verify", stage="train", rank=rank, layer_number=layer)


@defect("a forward used other experts", "verify.match")
def _(trace: Trace) -> None:
    one = last(trace, event="router_replay_forward_verify", action="replay_forward")
    one["matches_expected"] = False
    spoil(one["actual"])


@defect("a match is contradicted by its hashes", "verify.contradiction")
def _(trace: Trace) -> None:
    one = last(trace, event="router_replay_forward_verify", action="replay_forward")
    one["fallback_rows"] = 0
    spoil(one["actual"])


@defect("a match is of another shape", "verify.contradiction")
def _(trace: Trace) -> None:
    one = last(trace, event="router_replay_forward_verify", action="replay_forward")
    one["actual"]["shape"] = [one["actual"]["shape"][0] + 1, one["actual"]["shape"][1]]


@defect("a forward was verified against other routes", "verify.expected")
def _(trace: Trace) -> None:
    one = last(trace, event="router_replay_forward_verify", action="replay_forward")
    spoil(one["expected"])
    one["actual"]["sha256"] = one["expected"]["sha256"]


@defect("a forward installed other routes", "installed.action")
def _(trace: Trace) -> None:
    spoil(last(trace, event="router_replay_action", action="replay_forward")["tensor"])


@defect("a backward installed other routes", "installed.action")
def _(trace: Trace) -> None:
    spoil(last(trace, event="router_replay_action", action="replay_backward")["tensor"])


@defect("a backward found nothing to install", "installed.action")
def _(trace: Trace) -> None:
    del last(trace, event="router_replay_action", action="replay_backward")["tensor"]


@defect(
    "two micro-batches were installed in each other's place",
    "installed.action",
    needs=lambda one: len(one.lengths) > one.microbatch,
)
def _(trace: Trace) -> None:
    rank, layer = _layer(trace)
    first, *_, other = trace.records(
        event="router_replay_action",
        action="replay_forward",
        stage="train",
        rank=rank,
        layer_number=layer,
    )
    first["tensor"], other["tensor"] = other["tensor"], first["tensor"]


@defect("a shard was not recorded", "cp.coverage")
def _(trace: Trace) -> None:
    remove(trace, last(trace, event="cp_routed_experts", stage="train"))


@defect("no shard of a stage was recorded", "cp.coverage")
def _(trace: Trace) -> None:
    trace.remove(event="cp_routed_experts", stage="train")


@defect("identities were not verified", "cp.identity")
def _(trace: Trace) -> None:
    for one in trace.records(event="cp_routed_experts"):
        one["cp_token_identity_verified_count"] = None
        one["token_identity"] = None


@defect("identities of a rank were not counted", "cp.identity")
def _(trace: Trace) -> None:
    last(trace, event="cp_routed_experts")["cp_token_identity_verified_count"] = None


@defect("no identity of a micro-batch was verified", "cp.identity", "cp.reassembly")
def _(trace: Trace) -> None:
    for one in trace.records(event="cp_routed_experts", microbatch_idx=1, stage="train"):
        one["cp_token_identity_verified_count"] = 0


@defect("fewer rows were verified than there are", "cp.reassembly", "cp.identity")
def _(trace: Trace) -> None:
    shards = trace.records(event="cp_routed_experts", stage="train")
    one = max(shards, key=lambda shard: shard["cp_token_identity_verified_count"])
    one["cp_token_identity_verified_count"] -= 1


@defect("more rows were verified than there are", "cp.reassembly", "cp.identity")
def _(trace: Trace) -> None:
    one = last(trace, event="cp_routed_experts", stage="train")
    one["cp_token_identity_verified_count"] = 10_000


@defect(
    "context-parallel ranks cut the same slice",
    "cp.reassembly",
    needs=lambda one: one.context > 1,
)
def _(trace: Trace) -> None:
    layout = trace.layout
    names = [f"r3_trace_node_pid{1001 + rank}.jsonl" for rank in range(layout.world)]
    for rank, name in enumerate(names):
        tensor, context, data, pipeline = coordinates(layout, rank)
        if context == 0:
            continue
        twin = next(
            other
            for other in range(layout.world)
            if coordinates(layout, other) == (tensor, 0, data, pipeline)
        )
        trace.files[name] = [
            copy.deepcopy(one)
            | {"rank": rank, "pid": 1001 + rank}
            | ({"cp_rank": context} if "cp_rank" in one else {})
            for one in trace.files[names[twin]]
        ]


@defect(
    "ranks of one micro-batch do not number themselves",
    "cp.coverage",
    needs=lambda one: one.context > 1,
)
def _(trace: Trace) -> None:
    last(trace, event="cp_routed_experts", stage="train")["cp_rank"] = 0


@defect("train replays other routes", "stage.routes", "installed.payload", needs=both_stages)
def _(trace: Trace) -> None:
    layout = trace.layout
    other = make_trace(layout, seed=1234)
    for name, records in trace.files.items():
        for mine, theirs in zip(records, other.files[name], strict=True):
            if mine.get("stage") == "train" and mine["event"] in (*_REPLAY, "cp_routed_experts"):
                for field in ("tensor", "actual", "expected"):
                    if field in theirs:
                        mine[field] = theirs[field]


@defect(
    "a layer was assigned other routes than its shard has",
    "installed.payload",
    needs=lambda one: not one.fallback,
)
def _(trace: Trace) -> None:
    """The first row of the first rank's layer: what a preview of the shard shows too."""
    layer = next(trace.records(event="router_replay_assignment", rank=0))["layer_number"]
    for record in trace.records(rank=0, layer_number=layer):
        for name in ("tensor", "actual", "expected"):
            if name in record:
                record[name] = shifted(record[name], trace.layout)


def shifted(tensor: Record, layout: Layout) -> Record:
    """Routes of the next experts in the first row."""
    values = np.array(tensor["preview"], np.int64)
    values[: layout.top_k] = (values[: layout.top_k] + 1) % layout.experts
    changed = copy.deepcopy(tensor)
    spoil(changed)
    changed["preview"] = values.tolist()
    if len(values) == tensor["shape"][0] * tensor["shape"][1]:
        changed["sha256"] = tensor_record(values)["sha256"]
    return changed


@defect(
    "an assignment has other choices a token",
    "tensor.shape",
    "verify.contradiction",
    "cp.reassembly",
)
def _(trace: Trace) -> None:
    rank, layer = _layer(trace)
    for record in trace.records(rank=rank, layer_number=layer):
        for field in ("tensor", "actual", "expected"):
            if field in record:
                rows, width = record[field]["shape"]
                record[field]["shape"] = [rows * width, 1]


@defect("a shard has tokens of other rows", "tensor.shape", "cp.reassembly")
def _(trace: Trace) -> None:
    one = last(trace, event="cp_routed_experts")
    one["input_ids"]["shape"] = [*one["input_ids"]["shape"], 1]


@defect("an expert is chosen twice", "route.values", "installed.payload", "verify.contradiction")
def _(trace: Trace) -> None:
    one = last(trace, event="router_replay_forward_verify")
    one["actual"]["preview"][1] = one["actual"]["preview"][0]


@defect("an expert does not exist", "route.values", "installed.payload", "verify.contradiction")
def _(trace: Trace) -> None:
    one = last(trace, event="router_replay_forward_verify")
    one["actual"]["preview"][0] = 10_000


def of_dtype(trace: Trace, dtype: str, names: tuple[str, ...], **fields: Any) -> None:
    """Give tensors of some records another dtype."""
    for one in trace.records(**fields):
        for name in names:
            if name in one:
                one[name]["dtype"] = dtype


@defect("shards of a rank have another dtype", "tensor.shape", needs=several_ranks)
def _(trace: Trace) -> None:
    rank = trace.layout.world - 1
    of_dtype(trace, "torch.uint8", ("tensor",), event="cp_routed_experts", rank=rank)


@defect("all shards are unsigned", "tensor.shape", "installed.payload")
def _(trace: Trace) -> None:
    of_dtype(trace, "torch.uint8", ("tensor",), event="cp_routed_experts")


@defect(
    "shards are not of the dtype that was fetched",
    "tensor.shape",
    "installed.payload",
    needs=queue,
)
def _(trace: Trace) -> None:
    of_dtype(trace, "torch.int16", ("tensor",), event="cp_routed_experts")


@defect("identities of a rank have another dtype", "tensor.shape", needs=several_ranks)
def _(trace: Trace) -> None:
    rank = trace.layout.world - 1
    of_dtype(trace, "torch.int64", ("token_identity",), event="cp_routed_experts", rank=rank)


@defect("tokens of a rank have another dtype", "tensor.shape", needs=several_ranks)
def _(trace: Trace) -> None:
    rank = trace.layout.world - 1
    of_dtype(trace, "torch.int32", ("input_ids",), event="cp_routed_experts", rank=rank)


@defect("a rank was assigned another dtype", "tensor.shape", needs=several_ranks)
def _(trace: Trace) -> None:
    rank = trace.layout.world - 1
    of_dtype(trace, "torch.uint8", ("tensor",), event="router_replay_assignment", rank=rank)


@defect("a rank installed another dtype", "tensor.shape", needs=several_ranks)
def _(trace: Trace) -> None:
    rank = trace.layout.world - 1
    of_dtype(trace, "torch.uint8", ("tensor",), event="router_replay_action", rank=rank)


@defect("what is assigned and installed is unsigned", "tensor.shape")
def _(trace: Trace) -> None:
    for event in ("router_replay_assignment", "router_replay_action"):
        of_dtype(trace, "torch.uint8", ("tensor",), event=event)


@defect("every token has the dummy route", "route.values", needs=lambda one: not one.fallback)
def _(trace: Trace) -> None:
    trace.files = make_trace(replace(trace.layout, dummy=True), seed=3).files


@defect("a row is partly missing", "route.values", "installed.payload")
def _(trace: Trace) -> None:
    one = next(trace.records(event="router_replay_assignment"))
    one["tensor"]["preview"][:2] = [-1, 3]


def with_a_dimension(trace: Trace, event: str, *names: str, **fields: Any) -> None:
    """Give tensors of the last such record a dimension more, of the same values."""
    one = last(trace, event=event, **fields)
    for name in names:
        one[name]["shape"] = [1, *one[name]["shape"]]


@defect("a forward installed another shape", "tensor.shape")
def _(trace: Trace) -> None:
    with_a_dimension(trace, "router_replay_action", "tensor", action="replay_forward")


@defect("a backward installed another shape", "tensor.shape")
def _(trace: Trace) -> None:
    with_a_dimension(trace, "router_replay_action", "tensor", action="replay_backward")


@defect("a forward was verified in another shape", "tensor.shape")
def _(trace: Trace) -> None:
    event = "router_replay_forward_verify"
    with_a_dimension(trace, event, "actual", "expected", action="replay_forward")


@defect("the last micro-batch was assigned in another shape", "tensor.shape")
def _(trace: Trace) -> None:
    with_a_dimension(trace, "router_replay_assignment", "tensor")


@defect("choices and experts of a router are in each other's place", "tensor.shape", "route.values")
def _(trace: Trace) -> None:
    """In all records of the last micro-batch of a layer, so that nothing disagrees but scores."""
    rank, layer = _layer(trace)
    for record in trace.records(rank=rank, layer_number=layer, stage="train"):
        for name in ("tensor", "actual", "expected"):
            if name in record:
                record[name]["shape"].reverse()


@defect("a verification is of more choices", "tensor.shape")
def _(trace: Trace) -> None:
    last(trace, event="router_replay_forward_verify")["topk"] += 1


@defect("a verification is of scores of other rows", "tensor.shape")
def _(trace: Trace) -> None:
    last(trace, event="router_replay_forward_verify")["scores_shape"][0] += 1


@defect("a verification is of scores of other experts", "tensor.shape")
def _(trace: Trace) -> None:
    one = last(trace, event="router_replay_forward_verify", action="replay_forward")
    one["scores_shape"][1] += 1


@defect("a verification is of another dtype", "tensor.shape")
def _(trace: Trace) -> None:
    one = last(trace, event="router_replay_forward_verify", action="replay_forward")
    one["actual"]["dtype"] = one["expected"]["dtype"] = "torch.int32"


@defect(
    "rows without a route are more than in another stage",
    "verify.contradiction",
    needs=both_stages,
)
def _(trace: Trace) -> None:
    """Which excuses other experts."""
    one = last(trace, event="router_replay_forward_verify", action="replay_forward")
    one["fallback_rows"] += 1
    spoil(one["actual"])


def several_layers(layout: Layout) -> bool:
    return len(layout.layers) >= 2 * layout.pipeline


def take_other_layer(trace: Trace, rank: int, **fields: Any) -> None:
    """Give all records of a rank's last layer the routes of the layer before it."""
    layers = trace.layout.layers_of(coordinates(trace.layout, rank)[3])
    of, others = (trace.records(rank=rank, layer_number=one, **fields) for one in layers[-2:])
    for source, record in zip(list(of), list(others), strict=True):
        for name in ("tensor", "actual", "expected"):
            if name in record:
                record[name] = copy.deepcopy(source[name])


@defect(
    "train replays a layer with the routes of another",
    "stage.routes",
    "installed.payload",
    needs=lambda one: both_stages(one) and several_layers(one),
)
def _(trace: Trace) -> None:
    for rank in range(trace.layout.world):
        take_other_layer(trace, rank, stage="train")


@defect(
    "a tensor rank replays a layer with the routes of another",
    "installed.payload",
    needs=lambda one: one.tensor > 1 and not one.sequence and several_layers(one),
)
def _(trace: Trace) -> None:
    take_other_layer(trace, trace.layout.world - 1)


_OF_A_BATCH = (
    "tensor",
    "token_identity",
    "input_ids",
    "actual",
    "expected",
    "scores_shape",
    "cp_token_identity_verified_count",
    "fallback_rows",
)


def replay_again(trace: Trace, *stages: str) -> None:
    """Replay the first micro-batch a second time instead of the second."""
    for records in trace.files.values():
        first: dict[object, Record] = {}
        seen = Counter[object]()
        for one in records:
            if one.get("stage") not in stages or one["event"] == "tq_fetch_sample":
                continue
            kind = tuple(
                one.get(key) for key in ("stage", "event", "action", "layer_number", "trace_step")
            )
            seen[kind] += 1
            if seen[kind] == 1:
                first[kind] = one
            elif seen[kind] == 2:
                same = {name: first[kind][name] for name in _OF_A_BATCH if name in first[kind]}
                one.update(copy.deepcopy(same))


def replayed_shards(layout: Layout) -> bool:
    return queue(layout) and several_batches(layout) and layout.capped > 1


@defect("train replays a micro-batch twice", "assign.coverage", needs=replayed_shards)
def _(trace: Trace) -> None:
    replay_again(trace, "train")


@defect("both stages replay a micro-batch twice", "assign.coverage", needs=replayed_shards)
def _(trace: Trace) -> None:
    replay_again(trace, *trace.layout.stages)


def shown_otherwise(trace: Trace, name: str, **fields: Any) -> None:
    """Change a value that the last such record shows, where its hash stays."""
    tensor = last(trace, **fields)[name]
    shown = next(one for one in ("preview", "valid_preview") if one in tensor)
    tensor[shown][-1] += 1


@defect("a backward shows other routes than its hash is of", "tensor.hash")
def _(trace: Trace) -> None:
    event, action = "router_replay_action", "replay_backward"
    shown_otherwise(trace, "tensor", event=event, action=action)


@defect("identities are shown otherwise than their hash is of", "tensor.hash", "cp.reassembly")
def _(trace: Trace) -> None:
    shown_otherwise(trace, "token_identity", event="cp_routed_experts", stage="train")


@defect(
    "tokens of a shard have another hash than is shown",
    "tensor.hash",
    "cp.reassembly",
    needs=lambda one: max(one.lengths) <= 8 and several_ranks(one),
)
def _(trace: Trace) -> None:
    spoil(last(trace, event="cp_routed_experts", stage="train")["input_ids"])


@defect("samples of a batch are of batches of other sizes", "tensor.shape", needs=queue)
def _(trace: Trace) -> None:
    one = last(trace, event="tq_fetch_sample")
    for name in ("routed_experts", "input_ids"):
        one[name]["full_shape"][0] += 1


@defect("a sample is of a batch of another length", "tensor.shape", needs=queue)
def _(trace: Trace) -> None:
    last(trace, event="tq_fetch_sample")["input_ids"]["full_shape"][1] += 1


@defect(
    "a pipeline stage holds other tokens than the others",
    "cp.reassembly",
    needs=lambda one: one.pipeline > 1 and one.tensor == 1,
)
def _(trace: Trace) -> None:
    tokens = last(trace, event="cp_routed_experts", stage="train")["input_ids"]
    tokens["preview"] = [one + 1 for one in tokens["preview"]]
    spoil(tokens)


@defect("tokens of a sample have no dimension", "tensor.shape", "fetch.hash", needs=queue)
def _(trace: Trace) -> None:
    tensor = last(trace, event="tq_fetch_sample")["input_ids"]
    tensor["valid_shape"], tensor["valid_preview"] = [], []


@defect(
    "a rank fetched a sample at another step",
    "fetch.coverage",
    "assign.coverage",
    needs=lambda one: one.queue and one.world > one.data and len(one.lengths) > 1,
)
def _(trace: Trace) -> None:
    last(trace, event="tq_fetch_sample")["trace_step"] += 1


@defect(
    "ranks fetched other routes of a sample whose producer was not traced",
    "fetch.hash",
    needs=lambda one: one.queue and one.world > one.data and len(one.lengths) > 1,
)
def _(trace: Trace) -> None:
    one = last(trace, event="tq_fetch_sample")
    trace.remove(event="rollout_payload_sample", key=one["key"])
    spoil(one["routed_experts"])

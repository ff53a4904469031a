"""Router-replay traces as a training of any layout leaves them, made without a training.

Written from the description of the emitter, not from the checker: tensors are built whole, packed,
cut and hashed with numpy, and every process writes its records in the order in which it would.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Record = dict[str, Any]
FETCH = {"prev-logprob": "prev_lp", "train": "train"}


@dataclass(frozen=True)
class Layout:
    """One training, as far as its traces show it.

    Args:
        tensor, context, data, pipeline: Sizes of the parallel dimensions.
        sequence: Whether tensor ranks split the tokens.
        packed: Whether the samples of a micro-batch share a row.
        layers: MoE layers, counted from 1.
        total_layers: All layers; the payload has these where `full`, else MoE layers only.
        full: Whether the payload has dense layers too.
        lengths: Tokens of the samples of a replica and step.
        microbatch: Samples of a micro-batch in train; half as many, at least 1, in prev-logprob
            where `apart`.
        steps: Traced steps.
        stages: Stages that replay.
        queue: Whether a TransferQueue carries the routes.
        data_slowest: Whether data-parallel ranks are numbered after pipeline ranks.
        fallback: Rows without a route at the start of each sample.
        recompute: Whether activations are recomputed, which verifies backward too.
        previewed: Samples of a producer or fetch whose values are shown.
        capped: Micro-batches of a step whose shards are recorded.
        top_k, experts: Choices of a token, and of how many.
        dummy: Whether every token has the dummy route, as where routes were lost.
        preferred: Share of the tokens of a layer to which its router gives the first experts.
        alike: Whether samples of as many tokens are equal, as short answers of one prompt are.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    sequence: bool = False
    packed: bool = True
    layers: tuple[int, ...] = (2, 3, 4)
    total_layers: int = 4
    full: bool = False
    lengths: tuple[int, ...] = (7, 5, 6, 8)
    microbatch: int = 2
    apart: bool = False
    steps: int = 1
    stages: tuple[str, ...] = ("prev-logprob", "train")
    queue: bool = True
    data_slowest: bool = False
    fallback: int = 0
    recompute: bool = False
    previewed: int = 2
    capped: int = 2
    top_k: int = 2
    experts: int = 8
    dummy: bool = False
    preferred: float = 0.0
    alike: bool = False

    @property
    def world(self) -> int:
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def contract(self) -> str:
        return "transfer-queue" if self.queue else "legacy-async"

    def layers_of(self, pipeline: int) -> tuple[int, ...]:
        """The MoE layers of a pipeline stage."""
        return tuple(
            int(one) for one in np.array_split(np.array(self.layers), self.pipeline)[pipeline]
        )

    def payload_idx(self, layer: int) -> int:
        return layer - 1 if self.full else self.layers.index(layer)


@dataclass
class Trace:
    """Files of a trace, each the records of one process."""

    layout: Layout
    files: dict[str, list[Record]] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        for name, records in self.files.items():
            lines = (json.dumps(one, sort_keys=True) + "\n" for one in records)
            (folder / name).write_text("".join(lines), encoding="utf-8")
        return folder

    def records(self, **fields: Any) -> Iterator[Record]:
        """Records with these values, in order."""
        for records in self.files.values():
            for one in records:
                if all(one.get(name) == value for name, value in fields.items()):
                    yield one

    def remove(self, **fields: Any) -> int:
        """Remove records with these values."""
        count = 0
        for name, records in self.files.items():
            kept = [
                one
                for one in records
                if any(one.get(key) != value for key, value in fields.items())
            ]
            count += len(records) - len(kept)
            self.files[name] = kept
        return count


@dataclass
class Sample:
    tokens: Array
    routes: Array
    key: str


def tensor_record(values: Array, *, limit: int = 16) -> Record:
    flat = values.reshape(-1)[:limit].tolist()
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    return {
        "shape": list(values.shape),
        "dtype": f"torch.{values.dtype}",
        "sha256": digest,
        "preview": flat,
    }


def make_trace(layout: Layout, seed: int = 0, restored: Any = ()) -> Trace:
    """The trace of a training; healthy, unless rows that a cache restored are no routes.

    Args:
        layout: The training.
        seed: Of tokens and routes.
        restored: (P, K) Routes of the first MoE layer of the first tokens of every sample.
    """
    random = np.random.default_rng(seed)
    trace = Trace(layout)
    samples = {
        (replica, step): [_sample(layout, random, length) for length in layout.lengths]
        for replica in range(layout.data)
        for step in range(1, layout.steps + 1)
    }
    for one in (one for made in samples.values() for one in made if len(restored)):
        one.routes[: len(restored), layout.payload_idx(layout.layers[0])] = restored
    if layout.queue:
        trace.files["r3_trace_node_pid1000.jsonl"] = list(_produced(layout, samples))
    for rank in range(layout.world):
        process = {"host": "node.example", "pid": 1001 + rank}
        records = [
            {"time": 2000.0 + number / 1000, "rank": rank, "world_size": layout.world}
            | process
            | one
            for number, one in enumerate(_worker(layout, rank, samples))
        ]
        trace.files[f"r3_trace_node_pid{1001 + rank}.jsonl"] = records
    return trace


def samples_of(layout: Layout, seed: int = 0) -> list[Sample]:
    """The samples of the first replica and step."""
    random = np.random.default_rng(seed)
    return [_sample(layout, random, length) for length in layout.lengths]


def _sample(layout: Layout, random: np.random.Generator, length: int) -> Sample:
    keys, random = random, np.random.default_rng(length) if layout.alike else random
    width = layout.total_layers if layout.full else len(layout.layers)
    routes = np.zeros((length, width, layout.top_k), np.int8)
    for row, layer in itertools.product(range(length), layout.layers):
        routes[row, layout.payload_idx(layer)] = random.permutation(layout.experts)[: layout.top_k]
        if layout.preferred and random.random() < layout.preferred:
            routes[row, layout.payload_idx(layer)] = np.arange(layout.top_k)
    moe = [layout.payload_idx(layer) for layer in layout.layers]
    routes[: min(layout.fallback, length - 1), moe] = -1
    routes[slice(None) if layout.dummy else -1, moe] = np.arange(layout.top_k)
    key = f"{int(keys.integers(1 << 60)):x}_g0"
    return Sample(random.integers(1, 1000, length), routes, key)


def _produced(layout: Layout, samples: dict[tuple[int, int], list[Sample]]) -> Iterator[Record]:
    for step in range(1, layout.steps + 1):
        made = [one for replica in range(layout.data) for one in samples[replica, step]]
        for one in _payloads(layout, "rollout_payload_sample", made):
            yield {
                "time": 1000.0 + step,
                "host": "node.example",
                "pid": 1000,
                "trace_step": step,
                **one,
            }


def _payloads(layout: Layout, event: str, samples: list[Sample]) -> Iterator[Record]:
    longest = max(len(one.tokens) for one in samples)
    for number, one in enumerate(samples):
        limit = 16 if number < layout.previewed else 0
        yield {
            "event": event,
            "sample_idx": number,
            "key": one.key,
            "valid_length": len(one.tokens),
            "routed_experts": _row_record(one.routes, len(samples), longest, limit),
            "input_ids": _row_record(one.tokens, len(samples), longest, limit),
        }


def _row_record(values: Array, batch: int, longest: int, limit: int) -> Record:
    whole = tensor_record(values, limit=limit)
    return {
        "full_shape": [batch, longest, *values.shape[1:]],
        "valid_shape": whole["shape"],
        "dtype": whole["dtype"],
        "valid_sha256": whole["sha256"],
        "valid_preview": whole["preview"],
    }


def coordinates(layout: Layout, rank: int) -> tuple[int, int, int, int]:
    """Tensor, context, data and pipeline rank; tensor is the fastest."""
    rest, tensor = divmod(rank, layout.tensor)
    rest, context = divmod(rest, layout.context)
    if layout.data_slowest:
        data, pipeline = divmod(rest, layout.pipeline)
    else:
        pipeline, data = divmod(rest, layout.data)
    return tensor, context, data, pipeline


def _worker(
    layout: Layout, rank: int, samples: dict[tuple[int, int], list[Sample]]
) -> Iterator[Record]:
    _, _, data, _ = coordinates(layout, rank)
    for step, stage in itertools.product(range(1, layout.steps + 1), layout.stages):
        of = samples[data, step]
        if layout.queue:
            for one in _payloads(layout, "tq_fetch_sample", of):
                yield {"stage": FETCH[stage], "trace_step": step, **one}
        size = (
            max(1, layout.microbatch // 2)
            if layout.apart and stage != "train"
            else layout.microbatch
        )
        batches = [of[start : start + size] for start in range(0, len(of), size)]
        for one in _stage(layout, rank, stage, batches):
            yield {"stage": stage, "trace_step": step, **one}


def _stage(layout: Layout, rank: int, stage: str, batches: list[list[Sample]]) -> Iterator[Record]:
    tensor, context, _, pipeline = coordinates(layout, rank)
    local = layout.layers_of(pipeline)
    queue: dict[int, list[Array]] = {layer: [] for layer in local}
    waiting: list[int] = []
    warm = layout.pipeline - 1 - pipeline if stage == "train" else 0
    for number, batch in enumerate(batches, 1):
        shard = make_shard(layout, batch, context)
        if number <= layout.capped:
            yield _shard_record(layout, number, context, shard)
        routes = _for_router(layout, shard["routes"], tensor)
        by_layer = {
            layer: np.ascontiguousarray(routes[:, layout.payload_idx(layer)]).astype(np.int64)
            for layer in local
        }
        for layer, values in by_layer.items():
            yield {
                "event": "router_replay_assignment",
                "layer_number": layer,
                "payload_idx": layout.payload_idx(layer),
                "tensor": tensor_record(values),
            }
        for layer, values in by_layer.items():
            queue[layer] = [*queue[layer], values] if stage == "train" else [values]
            yield _action("replay_forward", layer, values, len(queue[layer]))
        used = {layer: _effective(layout, values) for layer, values in by_layer.items()}
        for layer, values in by_layer.items():
            yield _verified(layout, "replay_forward", layer, used[layer], values)
            queue[layer][-1] = used[layer]
        if stage != "train":
            continue
        waiting.append(number)
        if len(waiting) > warm:
            waiting.pop(0)
            yield from _backward(layout, queue)
    for _ in waiting:
        yield from _backward(layout, queue)


def _backward(layout: Layout, queue: dict[int, list[Array]]) -> Iterator[Record]:
    for layer, values in queue.items():
        yield _action("replay_backward", layer, values[0], len(values))
    if layout.recompute:
        for layer, values in queue.items():
            first = values.pop(0)
            yield _verified(layout, "replay_backward", layer, first, first)


def make_shard(layout: Layout, batch: list[Sample], context: int) -> dict[str, Array]:
    """Tokens, routes and identities of a micro-batch, packed or in rows, and cut."""
    if not layout.packed:
        longest = max(len(one.tokens) for one in batch)
        longest += -longest % (layout.tensor if layout.sequence else 1)
        padded = [longest] * len(batch)
    else:
        multiple = (2 * layout.context if layout.context > 1 else 1) * (
            layout.tensor if layout.sequence else 1
        )
        padded = [-(-len(one.tokens) // multiple) * multiple for one in batch]
    width = batch[0].routes.shape[1]
    rows = sum(padded)
    tokens = np.zeros(rows, np.int64)
    identity = np.zeros((rows, 3), np.int32)
    routes = np.broadcast_to(
        np.arange(layout.top_k, dtype=np.int8), (rows, width, layout.top_k)
    ).copy()
    keep: list[Array] = []
    start = 0
    for number, (one, room) in enumerate(zip(batch, padded, strict=True)):
        length = len(one.tokens)
        tokens[start : start + length] = one.tokens
        routes[start : start + length] = one.routes
        identity[start : start + length] = [(number, position, 1) for position in range(length)]
        if not layout.packed:
            identity[start + length : start + room, 0] = number
            identity[start + length : start + room, 1] = np.arange(length, room)
        keep.append(start + _zigzag(room, context, layout.context))
        start += room
    index = np.concatenate(keep)
    shape = (1, len(index)) if layout.packed else (len(batch), padded[0])
    return {
        "tokens": tokens[index].reshape(shape),
        "routes": routes[index].reshape(*shape, width, layout.top_k),
        "identity": identity[index].reshape(*shape, 3),
    }


def _zigzag(room: int, rank: int, size: int) -> Array:
    if size == 1:
        return np.arange(room)
    chunks = np.arange(room).reshape(2 * size, -1)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]])


def _for_router(layout: Layout, routes: Array, tensor: int) -> Array:
    """Rows in the order of Megatron, and under sequence parallelism a tensor rank's part."""
    rows = routes.transpose(1, 0, 2, 3).reshape(-1, *routes.shape[2:])
    return np.array_split(rows, layout.tensor)[tensor] if layout.sequence else rows


def _effective(layout: Layout, values: Array) -> Array:
    """What the forward uses: its own choice where a row has none."""
    used = values.copy()
    used[(values == -1).all(axis=-1)] = np.arange(layout.top_k) + 1
    return used


def _shard_record(layout: Layout, number: int, context: int, shard: dict[str, Array]) -> Record:
    return {
        "event": "cp_routed_experts",
        "microbatch_idx": number,
        "cp_rank": context,
        "cp_size": layout.context,
        "tensor": tensor_record(shard["routes"]),
        "token_identity": tensor_record(shard["identity"]),
        "input_ids": tensor_record(shard["tokens"]),
        "cp_token_identity_verified_count": int(shard["identity"][..., 2].sum()),
    }


def _action(action: str, layer: int, values: Array, queued: int) -> Record:
    return {
        "event": "router_replay_action",
        "action": action,
        "layer_number": layer,
        "tensor": tensor_record(values),
        "replay_backward_list_len": queued,
    }


def _verified(layout: Layout, action: str, layer: int, used: Array, expected: Array) -> Record:
    return {
        "event": "router_replay_forward_verify",
        "action": action,
        "layer_number": layer,
        "topk": layout.top_k,
        "scores_shape": [len(used), layout.experts],
        "actual": tensor_record(used),
        "expected": tensor_record(expected),
        "matches_expected": True,
        "fallback_rows": int((expected == -1).all(axis=-1).sum()),
        "replay_backward_list_len_before": 1,
        "replay_backward_list_len_after": 1,
    }

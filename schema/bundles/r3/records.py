"""What a line of a router-replay trace of NeMo-RL says: six kinds of records.

Source: NVIDIA NeMo-RL, `nemo_rl/utils/r3_trace.py`, as of mid 2026.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

PAYLOAD = "rollout_payload_sample"
FETCH = "tq_fetch_sample"
SHARD = "cp_routed_experts"
ASSIGNMENT = "router_replay_assignment"
ACTION = "router_replay_action"
VERIFY = "router_replay_forward_verify"
EVENTS = (PAYLOAD, FETCH, SHARD, ASSIGNMENT, ACTION, VERIFY)
FORWARD, BACKWARD = "replay_forward", "replay_backward"
BYTES = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1}  # of a value, by dtype


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What a trace keeps of a tensor: never its values, but a hash and the first of them.

    Args:
        shape: Its shape.
        dtype: Name without the prefix `torch.`.
        sha256: Of its contiguous bytes in its own dtype; the shape is not hashed.
        preview: The first values in row-major order.
        full_shape: Shape of the batch that it is one row of, where it is.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    preview: tuple[int, ...]
    full_shape: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the preview holds every value."""
        return len(self.preview) == self.size

    @property
    def size_bytes(self) -> int:
        """Bytes of all values."""
        return self.size * BYTES[self.dtype]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """The whole rows of the preview: of routes, each the choices of one token."""
        width = self.shape[-1] if self.shape else 0
        starts = range(0, len(self.preview) - width + 1, width) if width else ()
        return [self.preview[start : start + width] for start in starts]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a record stands and which process wrote it.

    Args:
        file: Name of the file in the trace folder.
        line: From 1.
        time: Seconds since the epoch.
        host: Machine.
        pid: Process on it.
        rank: Rank in the training job; None outside of it.
        world_size: Ranks of the job, where known.
    """

    file: str
    line: int
    time: float
    host: str
    pid: int
    rank: int | None
    world_size: int | None

    @property
    def process(self) -> str:
        """The process, as `host:pid`."""
        return f"{self.host}:{self.pid}"


@dataclass(frozen=True, slots=True)
class PayloadSample:
    """A sample as a producer put it (`stage` None), or as a rank fetched it."""

    origin: Origin
    trace_step: int
    stage: str | None
    sample_idx: int
    key: str
    valid_length: int
    routed_experts: TensorRecord
    input_ids: TensorRecord | None


@dataclass(frozen=True, slots=True)
class Shard:
    """What one context-parallel rank holds of a micro-batch."""

    origin: Origin
    trace_step: int
    stage: str
    microbatch: int
    cp_rank: int
    cp_size: int
    routes: TensorRecord
    identity: TensorRecord | None
    input_ids: TensorRecord | None
    verified: int | None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The routes of one layer for one micro-batch, as handed to the router."""

    origin: Origin
    trace_step: int
    stage: str
    layer: int
    payload_idx: int
    routes: TensorRecord


@dataclass(frozen=True, slots=True)
class Action:
    """A router set to replay, forward or backward."""

    origin: Origin
    trace_step: int
    stage: str
    action: str
    layer: int | None
    routes: TensorRecord | None


@dataclass(frozen=True, slots=True)
class Verification:
    """The routes that a forward used beside those that were installed."""

    origin: Origin
    trace_step: int
    stage: str
    action: str
    layer: int | None
    top_k: int
    scores_shape: tuple[int, ...] | None
    actual: TensorRecord
    expected: TensorRecord | None
    matches: bool
    fallback_rows: int


TraceRecord: TypeAlias = PayloadSample | Shard | Assignment | Action | Verification

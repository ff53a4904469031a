"""Who a capture is: its key, producer and parallel coordinates, and the ids that people choose."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from trajreplay.schema.errors import SchemaError, named, shown

Kind = Literal["rollout", "step", "events"]
KINDS: tuple[Kind, ...] = ("rollout", "step", "events")
DATA = "data"
DROPPED = "dropped"
_MAX_ID_BYTES = 128
_MAX_INT64 = 2**63 - 1
_MAX_INT32 = 2**31 - 1


IDS = "ids"  # the fact of a producer that says what the ids of a capture are local to
BY_RANK, GLOBAL = "rank", "global"
UNPROVEN = "unproven"  # the fact that says why nothing shows that all ranks of a set are there


class CaptureKey(NamedTuple):
    """The key of a manifest entry; tuples of it sort by run, attempt, kind, rollout, step, rank."""

    run_id: str
    attempt: int
    kind: Kind
    rollout_id: int | None
    step_id: int | None
    rank: int
    part: str = DATA

    def __str__(self) -> str:
        step = "" if self.step_id is None else f" step {self.step_id}"
        attempt = f" attempt {self.attempt}" if self.attempt else ""
        return f"run {self.run_id!r}{attempt} rollout {self.rollout_id}{step} rank {self.rank}"


@dataclass(frozen=True)
class ParallelCoordinates:
    """Where a rank stands in each parallel dimension, and how large that dimension is.

    Tensor rank 0 of the last pipeline stage, which computes the loss, owns the samples of its data
    and context rank. The others of these hold copies: what they record is compared byte for byte
    with the owner's, and counted once.
    """

    data_rank: int = 0
    data_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    pipeline_rank: int = 0
    pipeline_size: int = 1
    context_rank: int = 0
    context_size: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            check_count(f"{name}_rank", rank)
            check_count(f"{name}_size", size)
            if rank >= size:
                raise SchemaError(
                    f"parallel coordinates: {name}_rank is {rank}, expected 0 to {name}_size - 1 "
                    f"= {size - 1}",
                    hint=f"Give the rank within its {name}-parallel group, and the group's size.",
                )

    @property
    def is_last_stage(self) -> bool:
        """Whether the rank is of the last pipeline stage, which computes the loss."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_owner(self) -> bool:
        """Whether its samples count, and those of the other tensor ranks and stages are copies."""
        return self.tensor_rank == 0 and self.is_last_stage

    @property
    def shard(self) -> tuple[int, int]:
        """The coordinates that make two captures hold different samples."""
        return self.data_rank, self.context_rank


@dataclass(frozen=True)
class ProducerInfo:
    """The program that captured.

    Args:
        commit: Version of the training code, as its version control names it.
        torch_version: Version of torch that computed the recorded values.
        role: What the process does: train, driver or rollout.
        framework: Trainer and version, free text.
        extra: Further facts, strings only.
    """

    commit: str = ""
    torch_version: str = ""
    role: str = "train"
    framework: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return asdict(self)


class ResumePoint(NamedTuple):
    """What an attempt was resumed from: everything of `attempt` before rollout `rollout_id`."""

    attempt: int
    rollout_id: int


def check_id(name: str, value: object) -> str:
    """Check an id that people choose and return it in NFC.

    Raises:
        SchemaError: Not a string, empty, longer than 128 bytes when percent-encoded, with control
            characters, not NFC, or one of the names that a file system keeps for itself.
    """
    if not isinstance(value, str):
        raise SchemaError(
            f"{name} is {shown(value)} of type {type(value).__name__}, expected a string",
            hint=f"Give {name} as text, for example {str(value)!r}.",
        )
    problem = _id_problem(value)
    if problem:
        raise SchemaError(
            f"{name} {named(value)} {problem}",
            hint="Expected 1 to 128 bytes after percent-encoding, NFC, without control characters.",
        )
    return value


@lru_cache(maxsize=4096)
def _id_problem(value: str) -> str:
    if value in ("", ".", ".."):
        return "is no name that a folder can have"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
        return "has control characters"
    if unicodedata.normalize("NFC", value) != value:
        return "is not in Unicode normal form C"
    if (size := len(quote(value, safe=""))) > _MAX_ID_BYTES:
        return f"takes {size} bytes when percent-encoded"
    return ""


def check_count(name: str, value: object, *, limit: int = _MAX_INT32) -> int:
    """Check a non-negative integer coordinate.

    Raises:
        SchemaError: Not an integer, negative, or above `limit`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise SchemaError(
            f"{name} is {named(value)}, expected an integer from 0 to {limit}",
            hint=f"Give {name} as the trainer counts it.",
        )
    return value


def make_key(
    run_id: str,
    attempt: int,
    kind: Kind,
    rollout_id: int | None,
    step_id: int | None,
    rank: int,
    part: str = DATA,
) -> CaptureKey:
    """Build a checked key.

    Raises:
        SchemaError: A coordinate is out of range, or missing for its kind.
    """
    check_id("run_id", run_id)
    check_count("attempt", attempt)
    check_count("rank", rank)
    if kind not in KINDS:
        raise SchemaError(f"kind is {kind!r}, expected one of {', '.join(KINDS)}")
    if rollout_id is not None:
        check_count("rollout_id", rollout_id, limit=_MAX_INT64)
    elif kind != "events":
        raise SchemaError(f"a {kind} capture has no rollout_id", hint="Give rollout_id=...")
    if step_id is not None:
        check_count("step_id", step_id, limit=_MAX_INT64)
    if (kind == "step") != (step_id is not None) and kind != "events":
        raise SchemaError(f"a {kind} capture has step_id {step_id!r}")
    return CaptureKey(run_id, attempt, kind, rollout_id, step_id, rank, part)


def rank_prefix(rank: int) -> str:
    """What begins the ids of a capture whose files count them from 0 on every rank."""
    return f"rank-{rank}/"


def own_prefix(producer: Mapping[str, Any], rank: int) -> str:
    """What begins the ids of a capture and was put there by its import; nothing where none was.

    Such ids are of one capture: those of a step name other samples than those of its rollout.
    """
    extra = producer.get("extra")
    local = isinstance(extra, Mapping) and extra.get(IDS) == BY_RANK
    return rank_prefix(rank) if local else ""

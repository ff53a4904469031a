"""Which process of a job captured, told so that what it left elsewhere is known as its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from blake3 import blake3

# Keys of a producer's `extra`.
PROCESS, RANK, WORLD = "process", "process_rank", "process_world"
_DIGEST_CHARACTERS = 32


@dataclass(frozen=True)
class TrainingProcess:
    """A process of torch.distributed.

    Args:
        digest: Of its host and number, as `process_digest` makes it.
        rank: Its rank in the job.
        world: Ranks of the job.
    """

    digest: str
    rank: int
    world: int

    def to_extra(self) -> dict[str, str]:
        """It as facts of a producer."""
        return {PROCESS: self.digest, RANK: str(self.rank), WORLD: str(self.world)}


def process_digest(host: str, pid: int) -> str:
    """What names a process: names of hosts are kept of no training, only that two are one.

    Args:
        host: The name that the host has for itself.
        pid: Number of the process there.

    >>> process_digest("node-7", 4001) == process_digest("node-7", 4001)
    True
    """
    return blake3(f"{host}:{pid}".encode()).hexdigest()[:_DIGEST_CHARACTERS]


def told_process(producer: Mapping[str, Any]) -> TrainingProcess | None:
    """The process that a producer says it was; None where it says none."""
    extra = producer.get("extra")
    if not isinstance(extra, Mapping):
        return None
    digest, rank, world = (extra.get(name) for name in (PROCESS, RANK, WORLD))
    if not (isinstance(digest, str) and _is_number(rank) and _is_number(world)):
        return None
    return TrainingProcess(digest, int(rank), int(world))


def _is_number(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 10

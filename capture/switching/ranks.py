"""What the ranks of a training agree on once, at start: who records, as which attempt."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trajreplay.capture.switching.meeting import meet
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.identity import ResumePoint, check_count
from trajreplay.schema.process import TrainingProcess, process_digest

# How many processes a launcher started, and which of them this one is. The first that says so
# counts: a launcher started by another one says both.
_LAUNCHED = (
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


@dataclass(frozen=True)
class Place:
    """Where a process stands among those that record.

    Args:
        rank: Its rank.
        expected_ranks: All ranks that record.
        attempt: The attempt of the run.
        resumed_from: What the attempt was resumed from.
    """

    rank: int
    expected_ranks: tuple[int, ...]
    attempt: int
    resumed_from: ResumePoint | None = None


def agree(
    lake: str,
    run_id: str,
    *,
    records: bool = True,
    rank: int | None = None,
    expected_ranks: Sequence[int] | None = None,
    attempt: int | None = None,
    resume_rollout_id: int | None = None,
    group: Any = None,
    alone: bool = False,
) -> Place:
    """Make the lake where it is missing, reserve the attempt, and learn who records.

    With an initialised torch.distributed this is collective: every rank calls it, once. Where one
    does not come the others record nothing.

    Args:
        lake: The lake.
        run_id: The run.
        records: Whether this process records.
        rank: This process; that of torch.distributed if omitted, 0 without.
        expected_ranks: The ranks that record; those that say so if omitted.
        attempt: The attempt; the next of the run if omitted.
        resume_rollout_id: The first rollout that is not taken from the attempt before.
        group: The process group that agrees; all processes if omitted.
        alone: Whether this process asks no others, whatever torch.distributed is used for, and
            however many were started with it.

    Raises:
        CaptureError: Several processes run and cannot agree, some of them did not come, the ranks
            are no set that this one is of, or the lake cannot be written.
        TrajReplayError: The lake or its record of attempts is refused.
    """
    ranks_of = None if alone else _distributed()
    if ranks_of is None:
        of_launcher = 0 if alone else _lone_rank(rank, expected_ranks, attempt)
        place = of_launcher if rank is None else check_count("rank", rank)
        ranks = _set_of(place, [place] if expected_ranks is None else expected_ranks, records)
        number, resumed = _reserve(lake, run_id, attempt, resume_rollout_id)
        return Place(place, ranks, number, resumed)
    mine = ranks_of.get_rank() if rank is None else check_count("rank", rank)
    meet(ranks_of, group)
    answers: list[Any] = [None] * ranks_of.get_world_size(group)
    ranks_of.all_gather_object(answers, mine if records else None, group=group)
    found: list[Any] = [None]
    if ranks_of.get_rank(group) == 0:
        try:
            found = [_reserve(lake, run_id, attempt, resume_rollout_id)]
        except Exception as error:  # noqa: BLE001 - the other ranks wait for an answer
            found = [str(error)]
    source = 0 if group is None else ranks_of.get_global_rank(group, 0)
    ranks_of.broadcast_object_list(found, src=source, group=group)
    if isinstance(found[0], str):
        raise CaptureError(f"rank 0 could not reserve an attempt of run {run_id!r}: {found[0]}")
    recording = [one for one in answers if one is not None]
    agreed = _set_of(mine, recording if expected_ranks is None else expected_ranks, records)
    return Place(mine, agreed, *found[0])


def _set_of(mine: int, ranks: Iterable[int], records: bool) -> tuple[int, ...]:
    """The ranks that record, in order.

    Raises:
        CaptureError: One of them is twice, or this one is none and records.
    """
    found = sorted(check_count("expected_ranks", one) for one in ranks)
    if len(set(found)) < len(found) or (records and mine not in found):
        raise CaptureError(
            f"the ranks that record are {found}, expected each once, and this one, {mine}",
            hint="Give each process a rank of its own, and the same expected_ranks to all.",
        )
    return tuple(found)


def _reserve(
    lake: str, run_id: str, attempt: int | None, resume_rollout_id: int | None
) -> tuple[int, ResumePoint | None]:
    from trajreplay.schema.lakefile import create_lake
    from trajreplay.writer.attempts import join_attempt, reserve_next_attempt

    store = create_lake(lake, exist_ok=True)
    if attempt is None:
        record = reserve_next_attempt(store, run_id, resume_rollout_id)
    else:
        record = join_attempt(store, run_id, attempt, resume_rollout_id)
    return record.attempt, record.resumed_from


def own_process() -> TrainingProcess | None:
    """What names this process where torch.distributed is in use, as its traces elsewhere do."""
    ranks_of = _distributed()
    if ranks_of is None:
        return None
    try:
        digest = process_digest(socket.gethostname(), os.getpid())
    except OSError:
        return None  # a host without a name
    return TrainingProcess(digest, int(ranks_of.get_rank()), int(ranks_of.get_world_size()))


def is_distributed() -> bool:
    """Whether several processes agree by torch.distributed."""
    return _distributed() is not None


def _distributed() -> Any:
    """torch.distributed where it is in use by several processes; torch is never loaded here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    return torch.distributed if torch.distributed.is_initialized() else None


def _lone_rank(rank: int | None, expected_ranks: Sequence[int] | None, attempt: int | None) -> int:
    """The rank of a process that cannot ask others; each would take itself for the only one."""
    for size, own in _LAUNCHED:
        world, mine = (os.environ.get(name, "").strip() for name in (size, own))
        if world in ("", "1") and mine in ("", "0"):
            if world:
                return 0
            continue
        told = f"{size} is {world}" if world else f"{own} is {mine}"
        if expected_ranks is None or attempt is None:
            raise CaptureError(
                f"{told} and torch.distributed is not initialised, so the ranks cannot agree on "
                "an attempt",
                hint="Enable capture after init_process_group, or give rank, expected_ranks and "
                "attempt, or alone=True where no other process records this run.",
            )
        if rank is not None:
            return rank
        if not (mine.isascii() and mine.isdigit()):
            raise CaptureError(
                f"{told} and {own} is {mine!r}, expected the rank of this process",
                hint="Give rank.",
            )
        return int(mine)
    return 0

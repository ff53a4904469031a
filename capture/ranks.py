"""What the ranks of a training agree on once, at start: who records, as which attempt."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trajreplay.schema.errors import CaptureError
from trajreplay.schema.identity import ResumePoint, check_count


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

    With an initialised torch.distributed this is collective: every rank calls it, once.

    Args:
        lake: The lake.
        run_id: The run.
        records: Whether this process records.
        rank: This process; that of torch.distributed if omitted, 0 without.
        expected_ranks: The ranks that record; those that say so if omitted.
        attempt: The attempt; the next of the run if omitted.
        resume_rollout_id: The first rollout that is not taken from the attempt before.
        group: The process group that agrees; all processes if omitted.
        alone: Whether this process asks no others, whatever torch.distributed is used for.

    Raises:
        CaptureError: Several processes run and cannot agree, or the lake cannot be written.
        TrajReplayError: The lake or its record of attempts is refused.
    """
    ranks_of = None if alone else _distributed()
    if ranks_of is None:
        place = rank if rank is not None else _lone_rank(expected_ranks, attempt)
        ranks = tuple(expected_ranks) if expected_ranks is not None else (place,)
        number, resumed = _reserve(lake, run_id, attempt, resume_rollout_id)
        return Place(place, ranks, number, resumed)
    mine = ranks_of.get_rank() if rank is None else check_count("rank", rank)
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
    agreed = tuple(expected_ranks) if expected_ranks is not None else tuple(sorted(recording))
    return Place(mine, agreed, *found[0])


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


def _distributed() -> Any:
    """torch.distributed where it is in use by several processes; torch is never loaded here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return None
    return torch.distributed if torch.distributed.is_initialized() else None


def _lone_rank(expected_ranks: Sequence[int] | None, attempt: int | None) -> int:
    """The rank of a process that cannot ask others."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world not in ("", "1") and (expected_ranks is None or attempt is None):
        raise CaptureError(
            f"WORLD_SIZE is {world} and torch.distributed is not initialised, so the ranks cannot "
            "agree on an attempt",
            hint="Enable capture after init_process_group, or give rank, expected_ranks, attempt.",
        )
    return int(os.environ.get("RANK") or 0)

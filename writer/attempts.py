"""Attempts of a run: each is recorded once, with what it was resumed from."""

from __future__ import annotations

import os
import unicodedata

from trajreplay.schema.attempt import AttemptRecord, dump_attempt, job_in, load_attempt
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.errors import CaptureError, SchemaError
from trajreplay.schema.identity import ResumePoint, check_count, check_id
from trajreplay.schema.layout import ATTEMPTS, attempt_path, run_of_attempt
from trajreplay.schema.store import Store, now_us

_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def reserve_attempt(
    store: Store, run_id: str, attempt: int, resumed_from: ResumePoint | None
) -> AttemptRecord:
    """Record an attempt, or join it if another rank has.

    Returns:
        The record that the lake holds, whoever wrote it.

    Raises:
        SchemaError: It is resumed from itself or a later attempt.
        CaptureError: It is recorded as resumed from elsewhere, or another run of the lake has the
            same id but for its case.
        DatasetError: Its record is damaged.
    """
    _check_resume(attempt, resumed_from)
    path = attempt_path(run_id, attempt)
    if not store.exists(path):
        _refuse_twin(store, run_id)
        record = AttemptRecord(
            run_id, attempt, now_us(), resumed_from, *job_in(os.environ), _restarts()
        )
        if store.publish_if_absent(path, dump_attempt(record)):
            return record
    record = load_attempt(store.read(path, MAX_BYTES), path)
    if resumed_from is not None and record.resumed_from != resumed_from:
        raise CaptureError(
            f"attempt {attempt} of run {run_id!r} is recorded as {_told(record.resumed_from)}, "
            f"this capture says {_told(resumed_from)}",
            hint="Give every rank the same resumed_from, and trajreplay certify the same "
            "--resume-rollout, or count the attempt up.",
            path=path,
        )
    return record


def reserve_next_attempt(
    store: Store, run_id: str, resume_rollout_id: int | None = None
) -> AttemptRecord:
    """Record the attempt after the last one of a run, which nobody else then has.

    Args:
        store: The lake.
        run_id: The run.
        resume_rollout_id: The first rollout that is not taken from the attempt before; None where
            nothing was resumed.

    Raises:
        SchemaError: The run's id or the rollout is none.
        CaptureError: Another run of the lake has the same id but for its case.
        DatasetError: Its records cannot be listed.
    """
    check_id("run_id", run_id)
    _refuse_twin(store, run_id)
    before = max(attempts_of(store, run_id), default=-1)  # another job that starts now is no parent
    resumed, attempt = None, before + 1
    if attempt and resume_rollout_id is not None:
        resumed = ResumePoint(before, resume_rollout_id)
    while True:
        _check_resume(attempt, resumed)
        record = AttemptRecord(run_id, attempt, now_us(), resumed, *job_in(os.environ), _restarts())
        if store.publish_if_absent(attempt_path(run_id, attempt), dump_attempt(record)):
            return record
        attempt += 1  # another job of the run was faster


def attempts_of(store: Store, run_id: str) -> list[int]:
    """The attempts that a run has records of.

    Raises:
        DatasetError: Its records cannot be listed.
    """
    folder = attempt_path(run_id, 0).rpartition("/")[0]
    return sorted(run_of_attempt(one.path)[1] for one in store.list(folder))


def join_attempt(
    store: Store, run_id: str, attempt: int, resume_rollout_id: int | None = None
) -> AttemptRecord:
    """Record an attempt whose number is given, or join it as it is recorded.

    Args:
        store: The lake.
        run_id: The run.
        attempt: Its number.
        resume_rollout_id: As of `reserve_next_attempt`; which attempt that is, a record says.

    Raises:
        CaptureError: It is recorded as resumed at another rollout, or not at all.
        SchemaError, DatasetError: As of `reserve_attempt`.
    """
    path, resumed = attempt_path(run_id, attempt), None
    if attempt and resume_rollout_id is not None:
        resumed = ResumePoint(attempt - 1, resume_rollout_id)
        if store.exists(path):
            known = load_attempt(store.read(path, MAX_BYTES), path).resumed_from
            if known is not None and known.rollout_id == resume_rollout_id:
                resumed = known
    return reserve_attempt(store, run_id, attempt, resumed)


def _check_resume(attempt: int, resumed_from: ResumePoint | None) -> None:
    if resumed_from is None:
        return
    check_count("resumed_from attempt", resumed_from.attempt)
    check_count("resumed_from rollout_id", resumed_from.rollout_id, limit=2**63 - 1)
    if resumed_from.attempt >= attempt:
        raise SchemaError(
            f"attempt {attempt} is resumed from attempt {resumed_from.attempt}, expected an "
            "earlier one",
            hint="Count attempt up at every restart; the first is 0.",
        )


def _refuse_twin(store: Store, run_id: str) -> None:
    """Two ids that differ only in case would be one folder on some file systems."""
    for other in {run_of_attempt(one.path)[0] for one in store.list(ATTEMPTS)}:
        if other != run_id and _folded(other) == _folded(run_id):
            raise CaptureError(
                f"run_id {run_id!r} equals run {other!r} of this lake but for its case",
                hint="Choose another run_id.",
                run_id=run_id,
            )


def _folded(text: str) -> str:
    return unicodedata.normalize("NFC", text.casefold())


def _restarts() -> dict[str, int]:
    """How often this was started before, as the batch system and the launcher count."""
    found = {name: os.environ.get(name, "") for name in _RESTARTS}
    return {
        name: int(count)
        for name, count in found.items()
        if count.isascii() and count.isdigit() and len(count) < 10
    }


def _told(point: ResumePoint | None) -> str:
    if point is None:
        return "not resumed"
    return f"resumed from attempt {point.attempt} at rollout {point.rollout_id}"

"""Attempts of a run: each is recorded once, with what it was resumed from."""

from __future__ import annotations

import os
import unicodedata

from trajreplay.schema.attempt import AttemptRecord, dump_attempt, load_attempt
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.errors import CaptureError, SchemaError
from trajreplay.schema.identity import ResumePoint, check_count, check_id
from trajreplay.schema.layout import ATTEMPTS, attempt_path, run_of_attempt
from trajreplay.schema.store import Store, now_us

_SCHEDULERS = {"slurm": "SLURM_JOB_ID", "lsf": "LSB_JOBID", "pbs": "PBS_JOBID"}
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
        record = AttemptRecord(run_id, attempt, now_us(), resumed_from, *_job(), _restarts())
        if store.publish_if_absent(path, dump_attempt(record)):
            return record
    record = load_attempt(store.read(path, MAX_BYTES), path)
    if resumed_from is not None and record.resumed_from != resumed_from:
        raise CaptureError(
            f"attempt {attempt} of run {run_id!r} is recorded as {_told(record.resumed_from)}, "
            f"this capture says {_told(resumed_from)}",
            hint="Give every rank the same resumed_from, or count the attempt up.",
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
    folder = attempt_path(run_id, 0).rpartition("/")[0]
    taken = [run_of_attempt(one.path)[1] for one in store.list(folder)]
    attempt = max(taken, default=-1) + 1
    while True:
        resumed = None
        if attempt and resume_rollout_id is not None:
            resumed = ResumePoint(attempt - 1, resume_rollout_id)
        _check_resume(attempt, resumed)
        record = AttemptRecord(run_id, attempt, now_us(), resumed, *_job(), _restarts())
        if store.publish_if_absent(attempt_path(run_id, attempt), dump_attempt(record)):
            return record
        attempt += 1  # another job of the run was faster


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


def _job() -> tuple[str, str]:
    """The batch system and the job that this process runs in, as far as they say."""
    for scheduler, variable in _SCHEDULERS.items():
        if job := os.environ.get(variable):
            return scheduler, job
    return "", ""


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

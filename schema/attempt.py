"""The record of one attempt of a run: when it started and what it was resumed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trajreplay.schema import exact
from trajreplay.schema.canonical import dump_signed, load_signed
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ResumePoint
from trajreplay.schema.layout import run_of_attempt

_SCHEDULERS = {"slurm": "SLURM_JOB_ID", "lsf": "LSB_JOBID", "pbs": "PBS_JOBID"}


def job_in(environ: Mapping[str, str]) -> tuple[str, str]:
    """The batch system and the job that an environment names; empty where it names none.

    >>> job_in({"SLURM_JOB_ID": "77"}), job_in({})
    (('slurm', '77'), ('', ''))
    """
    for scheduler, variable in _SCHEDULERS.items():
        if job := environ.get(variable):
            return scheduler, job
    return "", ""


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt.

    Args:
        run_id, attempt: Which one.
        started_us: When its first capture started, microseconds since 1970.
        resumed_from: The earlier attempt and the first rollout that is not taken from it.
        scheduler: The batch system that ran it, empty if none was seen.
        job_id: Its job there.
        restarts: How often the batch system and the launcher had started it before, by the
            variables that say so.
    """

    run_id: str
    attempt: int
    started_us: int
    resumed_from: ResumePoint | None = None
    scheduler: str = ""
    job_id: str = ""
    restarts: Mapping[str, int] = field(default_factory=dict)


def dump_attempt(record: AttemptRecord) -> bytes:
    """The record as the bytes of its file."""
    tree = vars(record) | {
        "resumed_from": record.resumed_from and list(record.resumed_from),
        "restarts": dict(record.restarts),
    }
    return dump_signed(tree)


def load_attempt(data: bytes, path: str) -> AttemptRecord:
    """Read the bytes of an attempt record's file.

    Raises:
        DatasetError: Damaged, or not the record that its path names.
    """
    tree = load_signed(data, path)
    run_id, attempt = run_of_attempt(path)
    try:
        resumed = tree["resumed_from"]
        record = AttemptRecord(
            exact.text(tree["run_id"]),
            exact.whole(tree["attempt"]),
            exact.whole(tree["started_us"]),
            None if resumed is None else ResumePoint(*map(exact.whole, exact.array(resumed))),
            exact.text(tree["scheduler"]),
            exact.text(tree["job_id"]),
            _restarts(tree.get("restarts", {})),  # of a record made before they were noted
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DatasetError(f"{path}: no attempt record: {error!r}", path=path) from error
    if (record.run_id, record.attempt) != (run_id, attempt):
        raise DatasetError(
            f"{path}: holds attempt {record.attempt} of run {record.run_id!r}, expected attempt "
            f"{attempt} of run {run_id!r}",
            hint="The file was renamed or copied; restore the manifest from a copy of the lake.",
            path=path,
        )
    return record


def _restarts(found: Any) -> dict[str, int]:
    if not isinstance(found, dict):
        raise TypeError(f"restarts are {found!r}")
    return {exact.text(name): exact.whole(count) for name, count in found.items()}

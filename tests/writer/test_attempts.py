"""Attempts and run ids: recorded once, and never two that a file system could confuse."""

from pathlib import Path

import pytest

from tests.helpers.captures import entries_of, record, verify
from trajreplay import CaptureError, Lake, SchemaError
from trajreplay.schema.attempt import load_attempt
from trajreplay.schema.identity import ResumePoint
from trajreplay.schema.layout import attempt_path


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def test_an_attempt_is_recorded_when_its_first_capture_starts(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "a secret")
    record(lake, attempt=1, resumed_from=(0, 12))
    path = attempt_path("r", 1)
    found = load_attempt((Path(lake.path) / path).read_bytes(), path)
    assert found.resumed_from == ResumePoint(0, 12)
    assert (found.scheduler, found.job_id) == ("slurm", "4711")
    assert found.restarts == {"SLURM_RESTART_COUNT": 2}
    assert found.started_us > 0


def test_every_capture_of_an_attempt_says_what_it_was_resumed_from(lake: Lake) -> None:
    record(lake, attempt=2, resumed_from=ResumePoint(1, 5))
    record(lake, attempt=2, rollout_id=6)
    assert {entry.resumed_from for entry in verify(lake)} == {ResumePoint(1, 5)}


@pytest.mark.parametrize("first", [(0, 12), None])
def test_ranks_that_disagree_on_the_resume_point_are_refused(
    lake: Lake, first: tuple[int, int] | None
) -> None:
    record(lake, attempt=1, resumed_from=first)
    with pytest.raises(CaptureError, match="attempt 1 of run 'r' is recorded as"):
        record(lake, attempt=1, rollout_id=1, resumed_from=(0, 13))
    assert len(entries_of(lake)) == 1


@pytest.mark.parametrize("point", [(1, 0), (2, 0)])
def test_an_attempt_is_resumed_from_an_earlier_one(lake: Lake, point: tuple[int, int]) -> None:
    with pytest.raises(SchemaError, match="expected an earlier one"):
        record(lake, attempt=1, resumed_from=point)


@pytest.mark.parametrize(
    ("first", "second"),
    [("Run", "run"), ("\u00c4-1", "\u00e4-1"), ("a/B", "A/b"), ("SS", "\u00df")],
)
def test_a_run_that_equals_another_but_for_its_case_is_refused(
    lake: Lake, first: str, second: str
) -> None:
    record(lake, run_id=first)
    with pytest.raises(CaptureError, match="but for its case"):
        record(lake, run_id=second)
    record(lake, run_id=first, rollout_id=1)
    assert {entry.key.run_id for entry in verify(lake)} == {first}


# K-099
@pytest.mark.parametrize(
    "run_id", ["a/b", "50%", "%2F", "a b", "..x", "\u8bad\u7ec3", "*?[", "=&#"]
)
def test_awkward_ids_come_back_from_the_lake(lake: Lake, run_id: str) -> None:
    record(lake, run_id=run_id)
    assert [entry.key.run_id for entry in verify(lake)] == [run_id]

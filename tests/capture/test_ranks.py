"""Ranks agree once, at start, on who records and as which attempt."""

import socket
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.captures import entries_of
from tests.helpers.processes import free_port, run_all
from tests.helpers.recorded import captured, enabled, switched
from tests.helpers.scenes import WAY
from trajreplay import CaptureError, Lake, ParallelCoordinates, ProducerInfo, capture
from trajreplay.capture import CaptureWarning
from trajreplay.capture.switching.ranks import Place, agree
from trajreplay.schema import ResumePoint
from trajreplay.schema.attempt import dump_attempt, load_attempt
from trajreplay.schema.lakefile import open_lake
from trajreplay.schema.layout import attempt_path
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.process import TrainingProcess, process_digest, told_process
from trajreplay.writer.attempts import join_attempt, reserve_attempt, reserve_next_attempt


def test_two_ranks_record_one_step_of_one_attempt(lake: Lake) -> None:
    for attempt in range(2):
        port = free_port()
        pids = run_all(
            "tests.helpers.recording_ranks", [(lake.path, rank, port) for rank in range(2)]
        )
        entries = [one for one in captured(lake) if one.key.attempt == attempt]
        assert [one.key.rank for one in entries] == [0, 1]
        assert {one.expected_ranks for one in entries} == {(0, 1)}
        events = [one for one in entries_of(lake) if one.key.kind == "events"]
        for one in [*entries, *(one for one in events if one.key.attempt == attempt)]:
            rank = one.key.rank
            digest = process_digest(socket.gethostname(), pids[rank])
            assert told_process(one.producer) == TrainingProcess(digest, rank, 2)
    assert lake.replay(attempt=1).verdict == "pass"


@pytest.mark.parametrize("late_s", [0.0, 8.0])
def test_a_rank_where_capture_is_off_or_late_ends_no_training(lake: Lake, late_s: float) -> None:
    """The others do not wait in a collective for it, nor it for them, and nothing is captured."""
    port = free_port()
    given = [(lake.path, rank, port, 0, late_s) for rank in range(2)]
    run_all("tests.helpers.recording_ranks", given, timeout_s=180.0)
    assert entries_of(lake) == []


def test_attempts_are_counted_from_the_lake(lake: Lake) -> None:
    store = open_lake(lake.path)
    assert reserve_next_attempt(store, "r", 7).attempt == 0
    reserve_attempt(store, "r", 4, None)
    record = reserve_next_attempt(store, "r", 7)
    assert (record.attempt, record.resumed_from) == (5, (4, 7))
    path = attempt_path("r", 5)
    assert load_attempt((Path(lake.path) / path).read_bytes(), path) == record
    assert reserve_next_attempt(store, "other").attempt == 0


def test_a_process_alone_is_rank_0_and_makes_its_lake(tmp_path: Path) -> None:
    place = agree(str(tmp_path / "new" / "lake"), "r")
    assert (place.rank, place.expected_ranks, place.attempt) == (0, (0,), 0)
    assert Lake.open(tmp_path / "new" / "lake").info().num_rows == 0


def test_ranks_may_be_given(lake: Lake) -> None:
    place = agree(lake.path, "r", rank=3, expected_ranks=[1, 3], attempt=2, resume_rollout_id=9)
    assert (place.rank, place.expected_ranks, place.attempt) == (3, (1, 3), 2)
    assert place.resumed_from == (1, 9)


LAUNCHED = [
    {"WORLD_SIZE": "4", "RANK": "2"},
    {"WORLD_SIZE": " 4", "RANK": "2"},
    {"RANK": "2"},
    {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"},
    {"PMI_SIZE": "4", "PMI_RANK": "2"},
    {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"},
]


@pytest.fixture
def _of_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {name for one in LAUNCHED for name in one}:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_of_no_launcher")
@pytest.mark.parametrize("environ", LAUNCHED, ids=lambda one: next(iter(one)))
@pytest.mark.parametrize("rank", [None, 0, 2])
@pytest.mark.parametrize("given", [{}, {"attempt": 0}, {"expected_ranks": [0, 2]}])
def test_several_processes_that_cannot_ask_each_other_are_refused(
    lake: Lake,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    rank: int | None,
    given: dict[str, Any],
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    told = rf"({'|'.join(environ)}) is \d and torch"
    with pytest.raises(CaptureError, match=told) as caught:
        enabled(lake, rank=rank, **given)
    assert "init_process_group" in caught.value.hint
    assert agree(lake.path, "r", rank=rank, expected_ranks=range(4), attempt=0).rank == (
        2 if rank is None else rank
    )
    assert agree(lake.path, "alone", rank=rank, alone=True) == Place(rank or 0, (rank or 0,), 0)


@pytest.mark.usefixtures("_of_no_launcher")
def test_one_process_of_a_launcher_is_alone(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")  # it started a launcher on each node
    assert agree(lake.path, "r").expected_ranks == (0,)


@pytest.mark.usefixtures("_of_no_launcher")
def test_a_process_that_does_not_know_its_rank_is_refused(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CaptureError, match="RANK is ''"):
        agree(lake.path, "r", expected_ranks=range(4), attempt=0)


@pytest.mark.parametrize(("rank", "ranks"), [(2, [0, 1]), (0, [0, 0]), (0, [])])
def test_ranks_that_are_no_set_with_this_one_are_refused(
    lake: Lake, rank: int, ranks: list[int]
) -> None:
    with pytest.raises(CaptureError, match="expected each once, and this one"):
        agree(lake.path, "r", rank=rank, expected_ranks=ranks, attempt=0)


def test_a_rank_that_holds_copies_records_nothing(lake: Lake) -> None:
    place = ParallelCoordinates(tensor_rank=1, tensor_size=2)
    options = {"settings": None, "rank": 1, "expected_ranks": [0], "attempt": 0}
    switches = capture.Switches(lake=lake.path, run_id="r", strict=True)
    assert not capture.enable(switches, parallel=place, **options).enabled  # type: ignore[arg-type]
    copies = {**options, "expected_ranks": [0, 1], "records": True}
    assert capture.enable(switches, parallel=place, **copies).enabled  # type: ignore[arg-type]


def test_two_jobs_that_start_at_once_continue_the_same_attempt(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_lake(lake.path)
    reserve_next_attempt(store, "r")
    publish, others = LocalStore.publish_if_absent, [7, 7]

    def late(self: LocalStore, path: str, data: bytes) -> bool:
        if others:  # another job is faster, and its own attempt is no parent of this one
            record = load_attempt(data, path)
            publish(
                self, path, dump_attempt(replace(record, resumed_from=ResumePoint(0, others.pop())))
            )
        return publish(self, path, data)

    monkeypatch.setattr(LocalStore, "publish_if_absent", late)
    record = reserve_next_attempt(store, "r", 7)
    assert (record.attempt, record.resumed_from) == (3, (0, 7))
    assert join_attempt(store, "r", 3, 7) == record  # as the trainer does that runs in it
    with pytest.raises(CaptureError, match="resumed from attempt 0 at rollout 7"):
        join_attempt(store, "r", 3, 8)


@pytest.mark.parametrize("role", ["driver", "rollout", "train"])
def test_a_driver_that_takes_an_attempt_of_its_own_is_warned_of(lake: Lake, role: str) -> None:
    def start(**options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            capture.enable(
                switched(lake), settings=WAY.short, producer=ProducerInfo(role=role), **options
            ).close()
        return [str(one.message) for one in told]

    own = start() + start(alone=True)
    assert ["TRAJREPLAY_ATTEMPT" in one for one in own] == [True] * (0 if role == "train" else 2)
    assert start(attempt=0) == []


@pytest.mark.parametrize("stage", [0, 1])
def test_the_last_pipeline_stage_records(lake: Lake, stage: int) -> None:
    place = ParallelCoordinates(pipeline_rank=stage, pipeline_size=2)
    switches = capture.Switches(lake=lake.path, run_id="r", strict=True)
    options = {"rank": stage, "expected_ranks": [1], "attempt": 0}
    assert capture.enable(switches, parallel=place, **options).enabled is bool(stage)  # type: ignore[arg-type]


def test_a_trainer_that_resumes_elsewhere_is_warned_of_and_raised_where_that_is_asked_for(
    lake: Lake,
) -> None:
    reserve_next_attempt(open_lake(lake.path), "r")
    reserve_next_attempt(open_lake(lake.path), "r")
    with pytest.warns(CaptureWarning, match="nothing is captured: attempt 1 .* not resumed"):
        assert not enabled(lake, strict=False, attempt=1, resume_rollout_id=3).enabled
    with pytest.raises(CaptureError, match="not resumed"):
        enabled(lake, attempt=1, resume_rollout_id=3)

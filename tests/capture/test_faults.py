"""Faults of disks, processes and hooks: no number of a training changes, no lake ever lies."""

import ctypes
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.captures import verify
from tests.helpers.processes import ROOT
from tests.helpers.recorded import captured
from tests.helpers.recorded_training import STEPS, learn, recording
from trajreplay import Lake, SampleRecord
from trajreplay.capture import CaptureWarning, Recorder
from trajreplay.capture.taking.pending import Pending
from trajreplay.capture.writing.background import THREAD
from trajreplay.schema.entry import Entry
from trajreplay.writer import CaptureBuilder

# Of Linux: linux/prctl.h and linux/capability.h.
_DROP_CAPABILITY, _IGNORES_PERMISSIONS = 24, 1

pytestmark = pytest.mark.filterwarnings("always::trajreplay.capture.CaptureWarning")


@pytest.fixture(scope="module")
def plain() -> str:
    """The parameters of the training without capture."""
    return learn(Recorder())


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every sync of a file take a while, as on a loaded file system."""
    sync = os.fsync

    def late(descriptor: int) -> None:
        time.sleep(0.02)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", late)


def by_status(lake: Lake, status: str) -> list[Entry]:
    return [one for one in captured(lake) if one.status == status]


def wait(recorder: Recorder) -> None:
    """Wait until the thread that writes has tried all that it was handed."""
    recorder.flush(20.0)


def check(lake: Lake, *, dropped: int) -> None:
    """Nothing in the lake is broken, and each step is there, as data or as dropped."""
    verify(lake)
    assert len(by_status(lake, "dropped")) == dropped
    assert len(captured(lake)) == STEPS
    complete = [one.key.rollout_id for one in by_status(lake, "complete")]
    report = lake.replay()
    found = {one.rollout_id: one.verdict for one in report.cohorts}
    assert {one: found[one] for one in complete if one is not None} == dict.fromkeys(
        complete, "pass"
    )
    assert set(found.values()) == (
        {"pass", "refused"} if dropped and complete else {"pass"} if complete else {"refused"}
    )


def test_capture_changes_no_number(lake: Lake, plain: str) -> None:
    recorder = recording(lake.path, strict=True)
    assert learn(recorder) == plain
    assert recorder.close()
    check(lake, dropped=0)


def test_a_slow_lake_is_waited_for_at_the_end_only(lake: Lake, plain: str, slow: None) -> None:
    recorder = recording(lake.path)
    assert learn(recorder) == plain
    assert recorder.close()
    check(lake, dropped=0)


def test_a_full_queue_drops_and_says_so(lake: Lake, plain: str, slow: None) -> None:
    recorder = recording(lake.path, queue_bytes=1)
    with pytest.warns(CaptureWarning, match="was dropped: queue full") as told:
        assert learn(recorder) == plain
    assert len(told) == 1
    assert recorder.close()
    dropped = by_status(lake, "dropped")
    assert 0 < len(dropped) < STEPS
    assert all("would exceed 1" in one.reason for one in dropped)
    check(lake, dropped=len(dropped))


def test_a_training_may_wait_for_room(lake: Lake, plain: str, slow: None) -> None:
    recorder = recording(lake.path, queue_bytes=1, wait_s=20.0)
    assert learn(recorder) == plain
    assert recorder.close()
    check(lake, dropped=0)


def test_what_is_not_written_in_time_is_noted_as_dropped(
    lake: Lake, plain: str, slow: None
) -> None:
    recorder = recording(lake.path)
    assert learn(recorder) == plain
    started = time.monotonic()
    recorder.close(timeout_s=0.0)
    assert time.monotonic() - started < 3.0
    assert recorder.flush(20.0)
    dropped = by_status(lake, "dropped")
    assert {one.reason for one in dropped} == {
        "the program ended before it was written; of it 8 samples are lost"
    }
    check(lake, dropped=len(dropped))


def test_a_lake_that_vanishes_is_warned_of_once_and_found_again(lake: Lake, plain: str) -> None:
    recorder = recording(lake.path)
    away = Path(f"{lake.path}-away")

    def unmount(step: int) -> None:
        recorder.flush(20.0)
        if step == 1:
            Path(lake.path).rename(away)
        if step == 3:
            away.rename(lake.path)

    with pytest.warns(CaptureWarning, match="a capture was not written") as told:
        assert learn(recorder, unmount) == plain
    assert recorder.close()
    assert len(told) == 1
    assert [one.key.rollout_id for one in by_status(lake, "dropped")] == [2, 3]
    check(lake, dropped=2)


def test_a_lake_that_is_back_at_the_end_has_what_was_noted_meanwhile(
    lake: Lake, plain: str
) -> None:
    recorder = recording(lake.path)
    away = Path(f"{lake.path}-away")
    Path(lake.path).rename(away)

    def away_for_all_of_it() -> None:
        assert learn(recorder) == plain
        assert not recorder.flush()

    with pytest.warns(CaptureWarning, match="a capture was not written"):
        away_for_all_of_it()
    away.rename(lake.path)
    assert recorder.close()
    check(lake, dropped=STEPS)
    counts = "select event, count(*) as n from events group by 1 order by 1"
    assert [one["n"] for one in lake.sql(counts).arrow().to_pylist()] == [STEPS, 1]


def test_a_lake_that_stays_away_is_told_at_the_end(lake: Lake) -> None:
    recorder = recording(lake.path)
    Path(lake.path).rename(f"{lake.path}-away")
    with pytest.warns(CaptureWarning) as told:
        assert (bool(learn(recorder)), recorder.close()) == (True, False)
    assert ["lacks what" in str(one.message) for one in told] == [False, True]


@settings(max_examples=8)  # each makes a lake
@given(away=st.lists(st.booleans(), min_size=1, max_size=6), at_end=st.booleans())
def test_a_lake_has_an_entry_of_each_step_or_close_says_that_it_lacks_some(
    away: list[bool], at_end: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lake, hidden = Lake.create(f"{folder}/lake"), Path(f"{folder}/hidden")
        recorder = recording(lake.path)
        here = Path(lake.path)

        def place(gone: bool) -> None:
            if gone and here.exists():
                here.rename(hidden)
            elif not gone and hidden.exists():
                hidden.rename(here)

        for step, gone in enumerate(away):
            recorder.flush(20.0)
            place(gone)
            with recorder.step(step, 0):
                recorder.record_policy_loss(0, [SampleRecord("s", 2, 3, [1, 1])], {"loss": 1.0})
        recorder.flush(20.0)
        place(at_end)
        assert recorder.close() is not at_end
        place(False)
        if not at_end:
            found = {one.key.rollout_id: one.status for one in captured(Lake.open(lake.path))}
            assert found == {
                step: "dropped" if gone else "complete" for step, gone in enumerate(away)
            }


def test_what_failed_to_be_written_is_not_kept_in_memory(lake: Lake) -> None:
    def held() -> int:
        return sum(type(one) in (Pending, CaptureBuilder) for one in gc.get_objects())

    gc.collect()
    before = held()
    recorder = recording(lake.path)
    Path(lake.path).rename(f"{lake.path}-away")
    with pytest.warns(CaptureWarning, match="a capture was not written"):
        learn(recorder, lambda step: wait(recorder))
    assert held() == before


def test_a_lake_that_cannot_hold_data_says_what_is_missing(lake: Lake, plain: str) -> None:
    (Path(lake.path) / "data").write_text("no folder")
    recorder = recording(lake.path)
    with pytest.warns(CaptureWarning, match="a capture was not written"):
        assert (learn(recorder), recorder.close()) == (plain, False)  # the heartbeats are missing
    assert len(by_status(lake, "dropped")) == STEPS


def test_a_full_disk_changes_no_number_and_is_noted(lake: Lake, plain: str) -> None:
    done = program(lake, "disk-full")
    assert (done.returncode, done.stdout, done.stderr) == (0, plain, "")
    assert all("File too large" in one.reason for one in by_status(lake, "dropped"))
    check(lake, dropped=STEPS)


def test_a_killed_rank_leaves_whole_captures_only(lake: Lake) -> None:
    done = program(lake, "kill")
    assert done.returncode == -9
    verify(lake)
    assert lake.validate().ok
    found = captured(lake)
    assert len(found) <= STEPS // 2 + 1
    assert all(one.status == "complete" for one in found)


def test_a_rank_of_several_that_is_killed_is_missed_by_the_steps_that_it_did_not_write(
    lake: Lake, plain: str
) -> None:
    killed = program(lake, "kill", 1, 2)
    other = program(lake, "none", 0, 2)
    assert (killed.returncode, other.returncode, other.stdout) == (-9, 0, plain)
    verify(lake)
    found = captured(lake)
    there = {one.key.rollout_id for one in found if one.key.rank == 1}
    assert {one.key.rollout_id for one in found if one.key.rank == 0} == {*range(STEPS)}
    assert len(there) < STEPS
    verdicts = {one.rollout_id: one.verdict for one in lake.replay().cohorts}
    assert verdicts == {step: "pass" if step in there else "refused" for step in range(STEPS)}


def test_a_lake_that_becomes_read_only_changes_no_number_and_is_told(
    lake: Lake, plain: str
) -> None:
    try:
        done = program(lake, "read-only")
    finally:
        for folder, _, _ in os.walk(lake.path):
            Path(folder).chmod(0o755)
    assert (done.returncode, done.stdout) == (0, plain)
    assert "captures were not written" in done.stderr
    assert captured(lake) == []
    verify(lake)


def test_no_thread_is_left_for_the_end_of_the_interpreter(lake: Lake) -> None:
    # It would be killed wherever it is, and take the exit code of the training with it.
    recorder = recording(lake.path)
    learn(recorder)
    assert recorder.close()
    assert all(one.name != THREAD for one in threading.enumerate())


HANGING = """
import atexit, sys, threading, time
import pyarrow as pa
import pyarrow.parquet as pq
from trajreplay.capture.writing.threads import leave_alone

def write():
    table = pa.table({"a": pa.array(range(1_000_000), pa.float64())})
    started.set()
    while True:
        pq.write_table(table, pa.BufferOutputStream())

class Late:
    sleep = staticmethod(time.sleep)

    def __del__(self):
        self.sleep(0.5)

started, late = threading.Event(), Late()
thread = threading.Thread(target=write, daemon=True)
thread.start()
started.wait()
atexit.register(leave_alone, thread)
print("the last line")
sys.exit(7)
"""


def test_a_write_that_goes_on_for_ever_does_not_change_how_a_program_ends() -> None:
    for _ in range(3):
        command = [sys.executable, "-c", HANGING]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (7, "the last line\n", "")


def test_a_program_whose_lake_hangs_ends_with_its_own_code(lake: Lake, plain: str) -> None:
    done = program(lake, "hang")
    assert (done.returncode, done.stdout) == (5, plain)
    assert "captures were not written" in done.stderr
    assert [one.status for one in captured(lake)] == []


def test_an_exception_in_a_hook_is_not_the_training_s(lake: Lake, plain: str) -> None:
    recorder = recording(lake.path)

    def wrong(step: int) -> None:
        with recorder.guard("hook of a test"):
            raise ZeroDivisionError
        recorder.record([], tokens=object())
        recorder.end_step()

    with pytest.warns(CaptureWarning) as told:
        assert learn(recorder, wrong) == plain
    assert len(told) == 3  # once each, however many steps
    recorder.close()
    check(lake, dropped=0)


def program(
    lake: Lake, fault: str, rank: int = 0, ranks: int = 1
) -> "subprocess.CompletedProcess[str]":
    module = "tests.helpers.recorded_training"
    return subprocess.run(
        [sys.executable, "-m", module, lake.path, fault, str(rank), str(ranks)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=_obey_permissions if fault == "read-only" else None,
    )


def _obey_permissions() -> None:
    """Take from a process of root that it may write to what is read-only."""
    ctypes.CDLL(None).prctl(_DROP_CAPABILITY, _IGNORES_PERMISSIONS, 0, 0, 0)

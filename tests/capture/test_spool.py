"""A spool: captures reach the lake through it, whatever is killed, full or away meanwhile."""

import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from tests.helpers.captures import data_files
from tests.helpers.processes import ROOT, run_all
from tests.helpers.recorded import captured, enabled, record_rollout, record_step, switched
from tests.helpers.recorded_training import STEPS, learn, recording
from tests.helpers.scenes import WAY
from trajreplay import CaptureError, Lake, SampleRecord, SchemaError, capture
from trajreplay.capture import CaptureWarning, Recorder, Switches
from trajreplay.capture.writing.background import THREAD as WRITER
from trajreplay.capture.writing.promoter import THREAD
from trajreplay.capture.writing.spool import _names, prepare, promoted, waiting
from trajreplay.schema import lakefile
from trajreplay.schema.store import Store

ROLLOUTS = 3


@pytest.fixture
def spool(tmp_path: Path) -> str:
    return str(tmp_path / "spool")


def train(recorder: Recorder) -> None:
    """Rollouts of one step each."""
    for rollout_id in range(ROLLOUTS):
        record_step(recorder, record_rollout(recorder, rollout_id), rollout_id)


def test_captures_reach_the_lake_packed_and_replay(lake: Lake, spool: str) -> None:
    recorder = enabled(lake, spool=spool)
    train(recorder)
    assert recorder.close()
    assert not waiting(spool)
    assert len(data_files(lake)) <= 3 * 2  # a table has a file, or two where one pass was early
    assert len(captured(lake)) == 2 * ROLLOUTS
    assert lake.validate(deep=True).findings == []
    assert lake.replay().verdict == "pass"
    events = lake.sql("select event from events").arrow()["event"].to_pylist()
    assert sorted(events) == ["heartbeat"] * ROLLOUTS + ["terminal"]


def test_no_number_changes_and_no_thread_is_left(lake: Lake, spool: str) -> None:
    recorder = recording(lake.path, strict=True, spool=spool)
    assert learn(recorder) == learn(Recorder())
    assert recorder.close()
    assert all(one.name != THREAD for one in threading.enumerate())
    assert len(captured(lake)) == STEPS


def test_ranks_of_one_machine_share_a_spool(lake: Lake, spool: str) -> None:
    switches = switched(lake, spool=spool)
    recorders = [
        capture.enable(
            switches,
            settings=WAY.short,
            rank=rank,
            expected_ranks=[0, 1],
            attempt=0,
            step_stages=["sample"],
            shared=False,
        )
        for rank in (0, 1)
    ]
    for rank, recorder in enumerate(recorders):
        with recorder.step(0, 0):
            one = SampleRecord(f"s-{rank}", 1, 2, [1], group_index=0)
            recorder.record_policy_loss(0, [one], log_probs=[[-1.0 - rank]])
    assert [one.close() for one in recorders] == [True, True]
    assert lake.replay().verdict == "pass"
    assert len(lake.sql("select * from steps").arrow()) == 2


def test_processes_that_share_a_spool_and_an_attempt_do_not_collide(lake: Lake, spool: str) -> None:
    steps = 2
    given = [(lake.path, spool, rank, "0,1", steps, -1.0 - rank) for rank in range(2)]
    run_all("tests.helpers.recording_spooled", given)
    if waiting(spool):  # one was at it when the other one ended
        assert promoted(spool, lake.path, wait_s=5.0).problems == []
    assert waiting(spool) == []
    found = lake.validate(deep=True).findings
    assert [one.message for one in found if one.severity != "info"] == []
    report = lake.replay()
    assert (report.verdict, len(report.cohorts)) == ("pass", steps)
    rows = lake.sql("select rollout_id, rank, log_probs from steps order by 1, 2").arrow()
    assert [tuple(one.values()) for one in rows.to_pylist()] == [
        (step, rank, [-1.0 - rank] * 2) for step in range(steps) for rank in range(2)
    ]
    counts = "select rank, event, count(*) as n from events group by all order by all"
    assert [tuple(one.values()) for one in lake.sql(counts).arrow().to_pylist()] == [
        (rank, event, 2 * steps) for rank in range(2) for event in ("heartbeat", "terminal")
    ]


def test_the_thread_that_writes_asks_the_spool_alone(
    lake: Lake, spool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: dict[str, set[str]] = {}
    open_lake = lakefile.open_lake

    def noted(path: str) -> Store:
        opened.setdefault(threading.current_thread().name, set()).add(str(path))
        return open_lake(path)

    monkeypatch.setattr(lakefile, "open_lake", noted)
    recorder = enabled(lake, spool=spool)
    train(recorder)
    assert recorder.close()
    assert opened[WRITER] == {spool}
    assert lake.path in opened[THREAD]


def test_what_the_lake_has_otherwise_is_noted_there_and_replays_as_no_pass(
    lake: Lake, spool: str
) -> None:
    for value in (-1.0, -2.0):
        recorder = enabled(lake, strict=False, spool=spool, attempt=0)
        with warnings.catch_warnings(), recorder.step(0, 0):
            one = SampleRecord("s", 2, 3, [1, 1])
            recorder.record_policy_loss(0, [one], {"loss": 0.0}, [[value] * 2])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert recorder.close() == (value == -1.0)
    data, note = captured(lake)
    assert (data.status, note.status) == ("complete", "dropped")
    assert "is committed with other content than it has in the spool" in note.reason
    assert len(waiting(spool)) == 1
    report = lake.replay()
    assert report.verdict == "refused"
    assert "recorded the same again and gave it up" in str(report.to_json())


def test_what_a_killed_training_spooled_is_promoted_afterwards(lake: Lake) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.recorded_training", lake.path, "kill-spooling"],
        cwd=ROOT,
        capture_output=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -9
    spool = f"{lake.path}-spool"
    there = {one.key for one in captured(lake)} | set(waiting(spool))
    assert {one.rollout_id for one in there if one.kind == "step"} == set(range(STEPS // 2 + 1))
    assert promoted(spool, lake.path, wait_s=0.0).problems == []
    lake = Lake.open(lake.path)
    assert lake.validate(deep=True).ok
    assert lake.replay().verdict == "pass"
    assert len(captured(lake)) == STEPS // 2 + 1
    assert not waiting(spool)


def test_the_next_training_promotes_what_was_left(lake: Lake, spool: str) -> None:
    prepare(spool, lake.path)
    left = enabled(Lake.open(spool))  # writes there as a training does that is killed then
    train(left)
    left.close()
    recorder = enabled(lake, spool=spool, attempt=1)
    assert recorder.close()
    assert not waiting(spool)
    assert {one.key.attempt for one in captured(lake)} == {0}
    assert lake.replay(attempt=0).verdict == "pass"


def test_a_lake_that_is_away_stops_nothing_and_loses_nothing(lake: Lake, spool: str) -> None:
    away = Path(f"{lake.path}-away")
    recorder = enabled(lake, spool=spool, strict=False)
    with warnings.catch_warnings(record=True) as told:  # the first may come from its thread
        warnings.simplefilter("always")
        Path(lake.path).rename(away)
        train(recorder)
        assert not recorder.close()
    said = [str(one.message) for one in told]
    assert any("is not a lake" in one for one in said)
    assert any(f" captures wait in {spool}" in one for one in said)
    assert any(f"trajreplay promote {spool}" in one for one in said)
    away.rename(lake.path)
    assert promoted(spool, lake.path, wait_s=0.0).problems == []
    assert Lake.open(lake.path).replay().verdict == "pass"


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_a_spool_that_goes_away_is_warned_of(lake: Lake, spool: str, instead: str) -> None:
    recorder = enabled(lake, spool=spool, strict=False)
    recorder.flush()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Path(spool).rename(f"{spool}-away")
        if instead == "a file":
            Path(spool).write_text("no folder")
        train(recorder)
        assert not recorder.close()
    assert any("a capture was not written" in str(one.message) for one in told)


def test_a_spool_that_cannot_be_one_is_warned_of_and_nothing_is_captured(
    lake: Lake, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    for name, found in {"file": "cannot be a spool", "full": "is no spool and not empty"}.items():
        with pytest.warns(CaptureWarning, match=found):
            recorder = enabled(lake, spool=str(tmp_path / name), strict=False)
        assert not recorder.enabled
    assert sorted(one.name for one in (tmp_path / "full").iterdir()) == ["x"]


def test_a_spool_belongs_to_one_lake(lake: Lake, spool: str, tmp_path: Path) -> None:
    prepare(spool, lake.path)
    prepare(spool, lake.path)
    other = Lake.create(tmp_path / "other")
    with pytest.raises(CaptureError, match="is a spool of"):
        prepare(spool, other.path)
    with pytest.raises(CaptureError, match="is no spool and not empty"):
        prepare(other.path, lake.path)
    with pytest.raises(CaptureError, match=r"is no spool: it has no spool\.json"):
        promoted(other.path, lake.path, wait_s=0.0)


def test_the_switch_is_a_folder(lake: Lake) -> None:
    given = {"TRAJREPLAY_CAPTURE": "1", "TRAJREPLAY_LAKE": lake.path, "TRAJREPLAY_RUN_ID": "r"}
    found = Switches.from_env({**given, "TRAJREPLAY_CAPTURE_SPOOL": "/local"})
    assert found is not None
    assert found.spool == "/local"
    with pytest.raises(SchemaError, match="expected a folder of this machine"):
        Switches.from_env({**given, "TRAJREPLAY_CAPTURE_SPOOL": "s3://bucket"})


def test_a_folder_that_another_rank_makes_the_spool_meanwhile_is_one(
    lake: Lake, spool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = _names

    def late(folder: str) -> set[str]:
        monkeypatch.setattr("trajreplay.capture.writing.spool._names", look)
        prepare(folder, lake.path)
        return look(folder)

    monkeypatch.setattr("trajreplay.capture.writing.spool._names", late)
    prepare(spool, lake.path)
    assert waiting(spool) == []

"""The commit protocol: one key, one content, whatever else goes wrong."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.captures import data_files, entries_of, record, sample, start, verify
from trajreplay import CaptureError, DatasetError, Lake
from trajreplay.schema.entry import Entry
from trajreplay.schema.layout import entry_path
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.writer import commit
from trajreplay.writer.parquet import write_table


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def capture(lake: Lake, reward: float = 0.5, loss: float = 1.0, **options: Any) -> Entry:
    return record(
        lake,
        lambda c: c.samples([sample(reward=reward)]),
        lambda c: c.tensor("log_probs", [[1.0, 2.0]]),
        lambda c: c.expected("loss.policy", loss=loss),
        **options,
    )


def unfinished(lake: Lake) -> list[Path]:
    return list((Path(lake.path) / "_tmp").glob("*"))


def test_a_retry_with_equal_content_is_a_success_and_writes_nothing(lake: Lake) -> None:
    first = capture(lake)
    before = data_files(lake)
    second = capture(lake)
    assert second.files[0].path == first.files[0].path
    assert data_files(lake) == before
    assert len(verify(lake)) == 1


def test_a_retry_without_rows_is_a_success(lake: Lake) -> None:
    for _ in "ab":
        with start(lake) as empty:
            empty.expected("loss.policy", loss=float("nan"))
    assert len(verify(lake)) == 1


def test_a_retry_from_another_host_and_commit_is_a_success(lake: Lake) -> None:
    from trajreplay import ProducerInfo

    capture(lake, producer=ProducerInfo(commit="a"))
    capture(lake, producer=ProducerInfo(commit="b"))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"reward": 0.75}, "column reward was"),
        ({"loss": 2.0}, r"output loss\.policy\.loss was 1\.0, is 2\.0"),
        ({"expected_ranks": [0, 1]}, r"expected_ranks was \(0,\), is \(0, 1\)"),
        ({"settings": RecomputeConfig(eps_clip=0.1)}, r"settings\.loss was"),
        ({"cohort_size": 4}, "cohort_size was None, is 4"),
    ],
)
def test_other_content_under_the_same_key_is_a_conflict_naming_both(
    lake: Lake, change: dict[str, Any], found: str
) -> None:
    before = capture(lake)
    files = data_files(lake)
    with pytest.raises(CaptureError, match=f"is committed with other content: .*{found}"):
        capture(lake, **change)
    assert data_files(lake) == files
    assert [one.created_us for one in verify(lake)] == [before.created_us]
    assert not unfinished(lake)


def test_a_conflict_says_what_to_do(lake: Lake) -> None:
    capture(lake)
    with pytest.raises(CaptureError, match=r"\n\nA retry must hold the same data; a restarted job"):
        capture(lake, loss=3.0)


def test_the_other_keys_are_free(lake: Lake) -> None:
    capture(lake)
    capture(lake, 1.0, attempt=1)
    capture(lake, 1.0, rollout_id=1)
    capture(lake, 1.0, step_id=0)
    capture(lake, 1.0, run_id="other")
    capture(lake, rank=1, expected_ranks=[0, 1])
    assert len(verify(lake)) == 6


def test_of_two_writers_at_once_the_later_keeps_no_file(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first commits while the second, which saw no entry, writes its file."""

    def write_late(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(commit, "write_table", write_table)
        capture(lake)
        return write_table(*arguments)

    monkeypatch.setattr(commit, "write_table", write_late)
    capture(lake)
    (entry,) = verify(lake)
    assert data_files(lake) == {entry.files[0].path}


def test_of_two_writers_with_other_content_the_later_is_refused_and_keeps_no_file(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_late(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(commit, "write_table", write_table)
        capture(lake)
        return write_table(*arguments)

    monkeypatch.setattr(commit, "write_table", write_late)
    with pytest.raises(CaptureError, match="other content"):
        capture(lake, loss=9.0)
    (entry,) = verify(lake)
    assert data_files(lake) == {entry.files[0].path}


# K-098
def test_many_writers_of_one_key_commit_it_once(lake: Lake) -> None:
    outcomes: list[str] = []

    def write(loss: float) -> None:
        try:
            outcomes.append(capture(lake, loss=loss).files[0].path)
        except CaptureError:
            outcomes.append("conflict")

    threads = [threading.Thread(target=write, args=(float(i % 2),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (entry,) = verify(lake)
    assert sorted(outcomes) == ["conflict"] * 4 + [entry.files[0].path] * 4
    assert data_files(lake) == {entry.files[0].path}


@pytest.mark.parametrize("step", ["write_table", "place", "publish"])
def test_a_failure_at_any_step_leaves_no_entry_and_the_next_try_succeeds(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        if step == "write_table":
            broken.setattr(commit, "write_table", fail)
        elif step == "place":
            broken.setattr(LocalStore, "place", fail)
        else:
            start(lake).__enter__()  # reserves the attempt, which publishes as well
            broken.setattr("trajreplay.schema.localstore.publish", fail)
        with pytest.raises(CaptureError, match="cannot be written: disk full"):
            capture(lake)
    assert not entries_of(lake)
    assert not unfinished(lake)
    capture(lake)
    assert len(verify(lake)) == 1


def test_a_file_is_synced_before_its_entry_is_published(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, link, rename = os.fsync, os.link, os.rename

    def logged(name: str, call: Any) -> Any:
        def logging(*arguments: Any, **options: Any) -> Any:
            events.append(name)
            return call(*arguments, **options)

        return logging

    start(lake).__enter__()
    for name, call in (("fsync", sync), ("link", link), ("rename", rename)):
        monkeypatch.setattr(os, name, logged(name, call))
    capture(lake)
    moved, linked = events.index("rename"), events.index("link")
    assert "fsync" in events[:moved]
    assert events[moved + 1] == "fsync"
    assert "fsync" in events[moved + 2 : linked]
    assert events[linked + 1 :] == ["fsync"]


def test_a_damaged_entry_is_refused_rather_than_overwritten(lake: Lake) -> None:
    path = Path(lake.path) / entry_path(capture(lake).key)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(DatasetError, match="truncated or changed"):
        capture(lake)
    assert path.read_bytes() == data[:-1]


def test_what_crashed_writers_left_is_swept_by_age_once(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(lake.path) / "_tmp"
    monkeypatch.setattr(commit, "_swept", set())
    old, new = folder / "old", folder / "new"
    for one in (old, new):
        one.write_bytes(b"half")
    past = new.stat().st_mtime - commit.SWEEP_AFTER_S - 60
    os.utime(old, (past, past))
    capture(lake)
    assert unfinished(lake) == [new]
    os.utime(new, (past, past))
    capture(lake, rollout_id=1)
    assert unfinished(lake) == [new]

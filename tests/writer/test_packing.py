"""Packed captures: several in one file, each as it was, and nothing lost or half there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.captures import data_files, entries_of, record, sample, start
from tests.helpers.processes import ROOT
from tests.helpers.strategies import CaptureData, captures
from trajreplay import CaptureError, Lake
from trajreplay.capture.writing.spool import prepare, waiting
from trajreplay.query.files.reading import read_columns
from trajreplay.schema.entry import Entry
from trajreplay.schema.entry_codec import same_content
from trajreplay.schema.identity import make_key
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.tables import TABLES
from trajreplay.writer import Event, commit_events, packing


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture
def spool(tmp_path: Path, lake: Lake) -> Lake:
    return spool_of(lake, tmp_path / "spool")


def spool_of(lake: Lake, folder: Path) -> Lake:
    prepare(str(folder), lake.path)
    return Lake.open(folder)


def rows_of(lake: Lake, entry: Entry) -> list[Any]:
    """The rows of a capture, by table, as the reader of the lake finds them."""
    store = LocalStore(lake.path)
    return [
        read_columns(store, entry, TABLES[one.table], sorted(one.columns)).to_pylist()
        for one in entry.files
    ]


def commit(spool: Lake, rollout_id: int, rank: int = 0, **fields: Any) -> Entry:
    return record(
        spool,
        lambda one: one.samples([sample(2 * rank, **fields), sample(2 * rank + 1, 3, **fields)]),
        lambda one: one.tensor("log_probs", [[-1.0 - rank, -2.0], [-0.5, -rollout_id, -0.25]]),
        rollout_id=rollout_id,
        rank=rank,
        expected_ranks=[0, 1],
    )


@settings(max_examples=15)  # each makes two lakes
@given(data=st.data(), kinds=st.lists(st.sampled_from(["rollout", "step"]), max_size=5))
def test_every_capture_is_what_it_was_in_the_spool(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kinds: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("packed")
    lake = Lake.create(folder / "lake")
    spool = spool_of(lake, folder / "spool")
    for rollout, kind in enumerate(kinds):
        drawn: CaptureData = data.draw(captures(kind))
        step = 0 if kind == "step" else None
        record(spool, drawn.hand_over, rollout_id=rollout, step_id=step)
    before = entries_of(spool)
    rows = [rows_of(spool, one) for one in before]
    checked = found_in(spool)
    done = lake.promote(spool.path)
    assert (done.captures, done.known, done.problems) == (len(kinds), 0, [])
    after = entries_of(lake)
    assert all(same_content(old, new) for old, new in zip(before, after, strict=True))
    found = [rows_of(lake, one) for one in after]
    assert repr(found) == repr(rows)  # NaN equals itself there
    assert not waiting(spool.path)
    assert not data_files(spool)
    assert found_in(Lake.open(lake.path)) == checked


def found_in(lake: Lake) -> list[tuple[str, str]]:
    """What a deep validation says of captures, whatever was drawn."""
    report = lake.validate(deep=True)
    return sorted((one.check, one.severity) for one in report.findings)


def test_captures_of_all_ranks_share_files_by_what_columns_they_have(
    lake: Lake, spool: Lake
) -> None:
    for rollout in range(3):
        for rank in (0, 1):
            commit(spool, rollout, rank, **({"truncated": False} if rollout == 2 else {}))
    done = lake.promote(spool.path)
    assert (done.captures, done.files) == (6, 2)
    assert len(data_files(lake)) == 2
    found = lake.sql("select rollout_id, rank, log_probs from rollouts order by all").arrow()
    assert found.to_pylist() == [
        {"rollout_id": rollout, "rank": rank, "log_probs": lists}
        for rollout in range(3)
        for rank in (0, 1)
        for lists in sorted([[-1.0 - rank, -2.0], [-0.5, -rollout, -0.25]])
    ]
    assert [one.verdict for one in lake.replay().cohorts] == ["pass"] * 3
    size = sum((Path(lake.path) / one).stat().st_size for one in data_files(lake))
    assert sum(lake.info()["bytes"].to_pylist()) == size
    validated = lake.validate()
    assert (validated.captures, validated.files, validated.bytes) == (6, 2, size)


def test_files_are_bounded_in_captures_and_bytes(
    lake: Lake, spool: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "PACK_CAPTURES", 3)
    for rollout in range(5):
        commit(spool, rollout)
    assert lake.promote(spool.path).files == 2
    monkeypatch.setattr(packing, "PACK_BYTES", 1)
    for rollout in range(5, 8):
        commit(spool, rollout)
    assert lake.promote(spool.path).files == 3


def test_dropped_captures_and_those_without_rows_are_promoted(lake: Lake, spool: Lake) -> None:
    record(spool, lambda one: one.samples([]), rollout_id=0)
    with start(spool, rollout_id=1) as given_up:
        given_up.drop("queue full")
    done = lake.promote(spool.path)
    assert (done.captures, done.files) == (2, 0)
    assert [one.status for one in entries_of(lake)] == ["complete", "dropped"]


def test_a_capture_that_the_lake_has_with_other_content_holds_up_no_other(
    lake: Lake, spool: Lake
) -> None:
    commit(lake, 0)
    commit(lake, 1)
    commit(spool, 0, raw_reward=2.0)
    commit(spool, 1)
    commit(spool, 2)
    done = lake.promote(spool.path)
    assert (done.captures, done.known) == (1, 1)
    (problem,) = done.problems
    assert isinstance(problem, CaptureError)
    assert "is committed with other content" in problem.message
    assert [one.rollout_id for one in waiting(spool.path)] == [0]
    assert [(one.key.rollout_id, one.status) for one in entries_of(lake)] == [
        (0, "complete"),
        (0, "dropped"),  # of which the lake has another, and says so
        (1, "complete"),
        (2, "complete"),
    ]


@settings(max_examples=15)  # each makes two lakes
@given(
    named=st.lists(st.tuples(st.sampled_from([None, 0]), st.integers(0, 2)), max_size=6),
    again=st.integers(0, 5),
)
def test_events_whose_name_is_taken_come_under_the_next_free_step_once(
    tmp_path_factory: pytest.TempPathFactory, named: list[tuple[int | None, int]], again: int
) -> None:
    folder = tmp_path_factory.mktemp("packed")
    lake = Lake.create(folder / "lake")
    spool = spool_of(lake, folder / "spool")
    store = LocalStore(spool.path)
    for number, (rollout, step) in enumerate(named):
        key = make_key("run", 0, "events", rollout, step, 0)
        noted = [Event("heartbeat", f'{{"number": {number}}}', time_us=one) for one in range(2)]
        commit_events(store, key, noted)
        kept = shutil.copytree(spool.path, folder / f"kept-{number}")
        found = lake.promote(spool.path)
        assert (found.captures, found.known, found.problems) == (1, 0, [])
        if number == again:  # as of a process that died before the spool was empty
            found = lake.promote(shutil.move(kept, folder / "kept"))
            assert (found.captures, found.known, found.problems) == (0, 1, [])
    lake = Lake.open(lake.path)
    rows = lake.sql("select detail, count(*) as n from events group by 1 order by 1").arrow()
    assert [tuple(one.values()) for one in rows.to_pylist()] == [
        (f'{{"number": {number}}}', 2) for number in range(len(named))
    ]
    for entry in entries_of(lake):
        assert {one["step_id"] for one in rows_of(lake, entry)[0]} == {entry.key.step_id}
    assert [one for one in lake.validate(deep=True).findings if one.check == "integrity"] == []


def test_events_of_a_rollout_that_the_lake_has_otherwise_stay(lake: Lake, spool: Lake) -> None:
    key = make_key("run", 0, "events", 0, None, 0)
    for one, time_us in ((lake, 1), (spool, 2)):
        commit_events(LocalStore(one.path), key, [Event("scored", time_us=time_us)])
    done = lake.promote(spool.path)
    assert (done.captures, len(done.problems), len(waiting(spool.path))) == (0, 1, 1)


def test_a_damaged_capture_stays_and_holds_up_no_other(lake: Lake, spool: Lake) -> None:
    damaged, _ = commit(spool, 0), commit(spool, 1)
    path = Path(spool.path) / damaged.files[0].path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    done = lake.promote(spool.path)
    assert done.captures == 1
    assert "is not the file that its entry names" in done.problems[0].message
    assert [one.rollout_id for one in waiting(spool.path)] == [0]


def test_an_export_takes_only_the_rows_that_are_asked_for(
    lake: Lake, spool: Lake, tmp_path: Path
) -> None:
    for rollout in range(3):
        for rank in (0, 1):
            commit(spool, rollout, rank)
    lake.promote(spool.path)
    lake = Lake.open(lake.path)
    assert len(data_files(lake)) == 1
    assert lake.export_lake(tmp_path / "small", rollouts=[1]).ok
    small = Lake.open(tmp_path / "small")
    assert small.sql("select distinct rollout_id from rollouts").arrow().to_pylist() == [
        {"rollout_id": 1}
    ]
    sizes = [(Path(small.path) / one).stat().st_size for one in data_files(small)]
    assert len(sizes) == 2
    entries = entries_of(small)
    assert {one.files[0].first_row_group for one in entries} == {0}


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_a_changed_byte_of_a_shared_file_is_found(
    lake: Lake, spool: Lake, part: float, deep: bool
) -> None:
    for rollout in range(3):
        for rank in (0, 1):
            commit(spool, rollout, rank)
    lake.promote(spool.path)
    assert Lake.open(lake.path).validate(deep=deep).ok
    (name,) = data_files(lake)
    path = Path(lake.path) / name
    content = bytearray(path.read_bytes())
    content[int(part * len(content))] ^= 1
    path.write_bytes(content)
    found = Lake.open(lake.path).validate(deep=deep).findings
    assert [one.path for one in found if one.check == "integrity"] == [name] * 6


def test_a_promotion_that_is_killed_anywhere_loses_nothing_and_shows_nothing_half(
    lake: Lake, spool: Lake, tmp_path: Path
) -> None:
    for rollout in range(2):
        for rank in (0, 1):
            commit(spool, rollout, rank, **({"truncated": True} if rollout else {}))
    everything = [list(one) for one in waiting(spool.path)]
    command = [sys.executable, "-m", "tests.helpers.promotions", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout)
    assert [one["code"] for one in rounds] == [9] * (len(rounds) - 1) + [0]
    assert len(rounds) > 40
    for one in rounds:
        assert set(one["wrong"]) <= {"completeness"}  # a rank is there before the other
        assert [key for key in everything if key not in one["lake"] + one["spool"]] == []
        assert (one["problems"], one["left"], one["files"]) == ([], 0, 0)
        assert one["after"] == everything
        assert one["ok_after"]

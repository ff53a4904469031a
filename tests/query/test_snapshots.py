"""Snapshots: the same lake with fewer files opened, and never another lake."""

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.bombs import plant
from tests.helpers.mutate import entry_file
from tests.helpers.queried import catalog_of, write_rollout, write_step
from trajreplay import CaptureError, DatasetError, Lake
from trajreplay.query import Catalog
from trajreplay.schema.filedigest import bytes_digest
from trajreplay.schema.layout import ENTRIES, SEGMENTS, SNAPSHOTS, entry_path
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.snapshot import Root, dump_root
from trajreplay.writer import snapshot as writing


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake.create(tmp_path / "lake")
    for rollout in (2, 9, 10):
        write_rollout(made, rollout)
        write_step(made, rollout, 0)
    return made


def segments(lake: Lake) -> list[Path]:
    return sorted(Path(lake.path, SEGMENTS).glob("*"))


def root_file(lake: Lake, number: int = 1) -> Path:
    return Path(lake.path, SNAPSHOTS, f"{number}.json")


def answers(lake: Lake) -> tuple[Any, ...]:
    lake.refresh()
    return (
        lake.info().to_pylist(),
        lake.sql("from manifest order by all").arrow().to_pylist(),
        lake.sql("select sum(reward) from steps where rollout_id = 9").arrow().to_pylist(),
        lake.replay().to_json(),
        [one for one in lake.validate().findings if one.check != "snapshot"],
    )


def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the entries' files that are read from now on."""
    seen: list[str] = []
    read = LocalStore.read

    def noted(store: LocalStore, path: str, limit_bytes: int) -> bytes:
        if path.startswith(ENTRIES):
            seen.append(path)
        return read(store, path, limit_bytes)

    monkeypatch.setattr(LocalStore, "read", noted)
    return seen


@pytest.mark.parametrize("most", [1, 3, 1024])
def test_every_answer_is_the_same_and_no_entry_is_opened(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(writing, "SEGMENT_ENTRIES", most)
    before = answers(lake)
    root = lake.snapshot()
    assert sum(one.entries for one in root.segments) == 12
    assert len(root.segments) == -(-12 // most)
    assert answers(lake) == before
    seen = opened(monkeypatch)
    lake.refresh()
    lake.info()
    lake.replay()
    assert seen == []


def test_segments_are_cut_by_bytes_too(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    size = max(path.stat().st_size for path in Path(lake.path, ENTRIES).rglob("*.json"))
    monkeypatch.setattr(writing, "SEGMENT_BYTES", 2 * size)
    assert len(lake.snapshot().segments) >= 6
    assert lake.validate().findings == []


def test_what_is_committed_later_is_there_at_once_and_added_by_the_next(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lake.snapshot()
    assert lake.snapshot() == first
    write_rollout(lake, 1)
    lake.refresh()
    assert lake.sql("select count(*) n from rollouts where rollout_id = 1").arrow()["n"][0].as_py()
    second = lake.snapshot()
    assert second.number == 2
    assert second.segments[:1] == first.segments
    assert [(one.entries, one.first_rollout) for one in second.segments[1:]] == [(2, 1)]
    seen = opened(monkeypatch)
    assert answers(lake)[0][0]["rollout_id"] == 1
    assert set(seen) == {entry_path(key) for key in catalog_of(lake).keys}  # by validate alone


def test_runs_and_attempts_have_segments_of_their_own(lake: Lake) -> None:
    write_rollout(lake, 2, attempt=1, run_id="r2")
    write_rollout(lake, 2, run_id="a/b c")
    found = lake.snapshot().segments
    assert {(one.run_id, one.attempt, one.entries) for one in found} == {
        ("r", 0, 12),
        ("r2", 1, 2),
        ("a/b c", 0, 2),
    }
    assert lake.validate().ok


def test_of_many_at_once_each_ends_with_all_entries_and_leaves_no_file(lake: Lake) -> None:
    lakes = [Lake.open(lake.path) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        roots = list(pool.map(Lake.snapshot, lakes))
    assert {sum(one.entries for one in root.segments) for root in roots} == {12}
    assert len(segments(lake)) == len(roots[0].segments)
    assert lake.validate().findings == []


KILLED = """
import os, signal, sys
from trajreplay import Lake
from trajreplay.schema.localstore import LocalStore
publish = LocalStore.publish_if_absent
def dying(store, path, data):
    if path.endswith(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return publish(store, path, data)
LocalStore.publish_if_absent = dying
Lake.open(sys.argv[1]).snapshot()
"""


@pytest.mark.parametrize(("ending", "left"), [(".json", 1), (".parquet", 0)])
def test_a_program_killed_while_it_makes_one_changes_nothing(
    lake: Lake, ending: str, left: int
) -> None:
    before = answers(lake)
    done = subprocess.run([sys.executable, "-c", KILLED, lake.path, ending], check=False)
    assert done.returncode == -9
    assert len(segments(lake)) == left
    assert answers(lake) == before
    assert [one.severity for one in lake.validate().findings] == ["info"] * left
    assert lake.snapshot().number == 1
    assert lake.validate().ok


def test_a_flipped_bit_anywhere_is_refused_and_what_to_do_helps(lake: Lake) -> None:
    before = answers(lake)
    lake.snapshot()
    (segment,) = segments(lake)
    for path in (segment, root_file(lake)):
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), 8 * len(whole) // 12):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            assert re.search(f"{path.name}: .*digest", refusal(lake))
            assert not lake.validate().ok
        path.write_bytes(whole[:-1])
        assert path.name in refusal(lake)
        path.write_bytes(whole)
    segment.unlink()
    assert re.search(f"{segment.name} in .* is missing", refusal(lake))
    shutil.rmtree(Path(lake.path, SNAPSHOTS))
    assert answers(lake) == before


def refusal(lake: Lake) -> str:
    """Why a replay refuses the lake, or every cohort of it."""
    lake.refresh()
    try:
        report = lake.replay()
    except DatasetError as error:
        return error.message
    assert {cohort.verdict for cohort in report.cohorts} == {"refused"}
    return "; ".join(found.message for one in report.cohorts for found in one.findings)


def resign(lake: Lake, change: Any) -> None:
    """Change the only segment of a lake, and let the root name it as it is then."""
    (path,) = segments(lake)
    catalog = Catalog.open(LocalStore(lake.path))
    change(path)
    data = path.read_bytes()
    (old,) = catalog.snapshot.root.segments
    named = old._replace(bytes=len(data), digest=bytes_digest(data))
    root_file(lake).write_bytes(dump_root(Root(1, (named,))))
    lake.refresh()


def test_an_entry_that_only_a_snapshot_changes_is_found(lake: Lake) -> None:
    lake.snapshot()

    def change(path: Path) -> None:
        table = pq.read_table(path)
        data = table["entry"][0].as_py()
        changed = data.replace(b'"owner":true', b'"owner":false')
        assert changed != data
        entries = [changed, *table["entry"].to_pylist()[1:]]
        pq.write_table(
            pa.Table.from_arrays(
                [table["path"], pa.array(entries, pa.binary())], schema=table.schema
            ),
            path,
        )

    resign(lake, change)
    with pytest.raises(DatasetError, match=r"data\.json: its bytes do not have the digest"):
        catalog_of(lake).entry(catalog_of(lake).keys[0])
    (found,) = lake.validate().findings
    assert found.check == "snapshot"
    assert "is not what the manifest's entry of that name holds" in found.message


def test_an_entry_that_was_lost_from_the_manifest_is_missed(lake: Lake) -> None:
    lake.snapshot()
    key = catalog_of(lake).keys[0]
    entry_file(lake, key).unlink()
    found = [one for one in lake.validate().findings if one.check == "snapshot"]
    assert [one.severity for one in found] == ["error"]
    assert entry_path(key) in found[0].message


def test_a_segment_that_claims_to_be_small_is_refused_before_it_takes_memory(lake: Lake) -> None:
    lake.snapshot()
    resign(lake, lambda path: plant(path, "entry", 1 << 20, claimed=1 << 30))
    assert re.search(r"segments/.*parquet: cannot be read: pages that decode", refusal(lake))


def test_a_segment_with_other_columns_is_refused(lake: Lake) -> None:
    lake.snapshot()
    resign(lake, lambda path: pq.write_table(pa.table({"path": ["x"]}), path))
    assert "its columns are" in refusal(lake)


@pytest.mark.parametrize("name", ["x.json", "01.json", "1.txt"])
def test_a_file_of_another_name_is_refused(lake: Lake, name: str) -> None:
    lake.snapshot()
    root_file(lake).with_name(name).write_bytes(b"")
    lake.refresh()
    with pytest.raises(DatasetError, match=f"{name}: no snapshot has this name"):
        lake.replay()
    assert not lake.validate().ok


def test_a_claim_held_while_a_snapshot_is_placed_is_no_snapshot(lake: Lake) -> None:
    """As on a file system without links, where a name is claimed by a file beside it."""
    lake.snapshot()
    before = answers(lake)
    for path in (root_file(lake, 2), *segments(lake)):
        path.with_name(f"{path.name}.claim").touch()
    assert answers(lake) == before
    assert lake.validate().findings == []


def test_a_root_of_a_newer_format_or_renamed_is_refused(lake: Lake) -> None:
    lake.snapshot()
    path = root_file(lake)
    root_file(lake, 7).write_bytes(path.read_bytes())
    lake.refresh()
    with pytest.raises(DatasetError, match=r"7\.json: holds the root of snapshot 1"):
        lake.replay()


def test_a_root_has_room_for_so_many_segments(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_BYTES", 100)
    with pytest.raises(CaptureError, match="a snapshot of 1 segments takes"):
        lake.snapshot()
    assert segments(lake) == []

import os
from pathlib import Path

import pytest

from tests.helpers.captures import record, start
from tests.helpers.mutate import entry_file
from tests.helpers.queried import catalog_of, write_rollout, write_step
from trajreplay import DatasetError, Lake, QueryError
from trajreplay.query import Catalog
from trajreplay.schema.layout import ENTRIES, attempt_path
from trajreplay.schema.localstore import LocalStore


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def test_keys_are_listed_in_order_and_indexed(lake: Lake) -> None:
    write_step(lake, 10, 0)
    write_rollout(lake, 9)
    catalog = catalog_of(lake)
    assert [(key.rollout_id, key.rank) for key in catalog.keys] == [
        (9, 0),
        (9, 1),
        (10, 0),
        (10, 1),
    ]
    assert [cohort[2:] for cohort in catalog.by_rollout["r", 0, 10]] == [(10, 0)]
    assert catalog.runs == {"r": (0,)}
    assert catalog.key_table["rank"].to_pylist() == [0, 1, 0, 1]


def test_a_catalog_does_not_see_later_commits_and_a_refreshed_lake_does(lake: Lake) -> None:
    write_rollout(lake, 0)
    count = "select count(*) as n from rollouts"
    assert lake.sql(count).arrow()["n"].to_pylist() == [4]
    write_rollout(lake, 1)
    assert lake.sql(count).arrow()["n"].to_pylist() == [4]
    lake.refresh()
    assert lake.sql(count).arrow()["n"].to_pylist() == [8]


def test_an_empty_lake_has_no_keys(lake: Lake) -> None:
    catalog = catalog_of(lake)
    assert not catalog.keys
    assert catalog.key_table.num_rows == 0
    with pytest.raises(QueryError, match="no run 'x'"):
        catalog.check_run("x")


@pytest.mark.parametrize("bit", [0, 77, 1200])
def test_a_flipped_bit_of_an_entry_is_named(lake: Lake, bit: int) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0])
    path = entry_file(lake, entry.key)
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"rollout\.-\.0\.data\.json.*digest"):
        catalog_of(lake).entry(entry.key)


def test_an_entry_under_another_key_is_refused(lake: Lake) -> None:
    first, second = write_rollout(lake, 0)
    path = entry_file(lake, second.key)
    path.write_bytes(entry_file(lake, first.key).read_bytes())
    with pytest.raises(DatasetError, match="holds the entry of"):
        catalog_of(lake).entry(second.key)


def test_a_link_among_the_entries_is_refused(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0])
    path = entry_file(lake, entry.key)
    path.with_name("rollout.-.1.data.json").symlink_to(path)
    with pytest.raises(DatasetError, match="link or special file"):
        catalog_of(lake)


def test_a_pipe_among_the_entries_is_refused_without_waiting(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0])
    os.mkfifo(entry_file(lake, entry.key).with_name("rollout.-.1.data.json"))
    with pytest.raises(DatasetError, match="link or special file"):
        catalog_of(lake)


@pytest.mark.parametrize("name", ["rollout.-.01.data.json", "notes.txt", "rollout.-.1.other.json"])
def test_a_misnamed_entry_is_refused_and_reported_where_not_strict(lake: Lake, name: str) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0])
    path = entry_file(lake, entry.key)
    path.with_name(name).write_bytes(path.read_bytes())
    with pytest.raises(DatasetError, match="no capture has this name"):
        catalog_of(lake)
    lenient = Catalog.open(LocalStore(lake.path), strict=False)
    assert [key.rank for key in lenient.keys] == [0]
    assert len(lenient.problems) == 1


def test_a_claim_beside_an_entry_is_no_entry(lake: Lake) -> None:
    (entry,) = write_rollout(lake, 0, ranks=[0])
    path = entry_file(lake, entry.key)
    path.with_name("rollout.-.1.data.json.claim").touch()
    assert len(catalog_of(lake).keys) == 1


def test_an_attempt_that_captured_nothing_yet_is_known(lake: Lake) -> None:
    write_rollout(lake, 0)
    with pytest.raises(RuntimeError, match="stop"), start(lake, attempt=1, resumed_from=(0, 1)):
        raise RuntimeError("stop")
    catalog = catalog_of(lake)
    assert catalog.runs == {"r": (0, 1)}
    assert catalog.resumed_from("r", 1) == (0, 1)
    assert catalog.resumed_from("r", 0) is None


def test_without_its_record_an_attempt_is_resumed_from_what_its_captures_say(lake: Lake) -> None:
    record(lake, lambda capture: capture.samples([]), attempt=1, resumed_from=(0, 3))
    (Path(lake.path) / attempt_path("r", 1)).unlink()
    assert catalog_of(lake).resumed_from("r", 1) == (0, 3)


def test_a_damaged_attempt_record_is_named(lake: Lake) -> None:
    write_rollout(lake, 0)
    (Path(lake.path) / attempt_path("r", 0)).write_bytes(b"{}")
    with pytest.raises(DatasetError, match=r"attempts/run_id=r/0\.json"):
        catalog_of(lake).resumed_from("r", 0)


@pytest.mark.parametrize(
    "run", ["a/b", "..x", "100%", "run 1", "ü", "a=b", "a'b", 'a"b', "a\\b", "-", "*[x]?"]
)
def test_awkward_run_ids_come_back_as_they_are(lake: Lake, run: str) -> None:
    write_rollout(lake, 3, run_id=run)
    found = lake.sql("select distinct run_id, rollout_id from rollouts").arrow().to_pylist()
    assert found == [{"run_id": run, "rollout_id": 3}]
    folders = {path.name for path in (Path(lake.path) / ENTRIES).iterdir()}
    assert len(folders) == 1

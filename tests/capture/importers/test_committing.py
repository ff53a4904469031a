"""An import into a lake that fails: nothing of a source is left, or the report says what is."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.slime_dumps import saved, training
from trajreplay import Lake
from trajreplay.capture.importers import ImportedSource, ImportOptions, import_files, importer_of
from trajreplay.schema.localstore import LocalStore

OPTIONS = ImportOptions(profile="slime", group_by_position=4)


class Killed(BaseException):
    """The process ends here."""


class Failing(LocalStore):
    """A lake of which one of the changes fails.

    Args:
        root: The lake.
        call: The method that fails.
        number: The call of it that does, counted from 1.
        error: How.
        late: Whether the change is made before it fails.
    """

    def __init__(
        self, root: Path, call: str, number: int, error: BaseException, *, late: bool = False
    ) -> None:
        super().__init__(root)
        self._call, self._left, self._error, self._late = call, number, error, late
        self.calls = 0

    def _count(self, call: str) -> bool:
        if call != self._call:
            return False
        self.calls += 1
        return self.calls == self._left

    def place(self, temporary: str, path: str) -> None:
        if self._count("place"):
            raise self._error
        super().place(temporary, path)

    def publish_if_absent(self, path: str, data: bytes) -> bool:
        fails = self._count("publish_if_absent")
        if fails and not self._late:
            raise self._error
        created = super().publish_if_absent(path, data)
        if fails:
            raise self._error
        return created


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A train dump of two steps on two ranks."""
    content = training()
    for shard in content["dp_shards"]:
        shard["num_microbatches"], shard["global_batch_sizes"] = [1, 1], [4, 4]
        shard["micro_batch_indices"] = [[0, 1], [2, 3]]
    return saved(content, tmp_path / "run" / "train_data" / "0.pt")


def attempt(store: LocalStore, dump: Path) -> ImportedSource:
    (source,) = import_files(store, importer_of("slime"), [dump], OPTIONS).sources
    return source


def data_of(lake: Lake) -> Iterator[str]:
    folder = Path(lake.path)
    return (str(one.relative_to(folder)) for one in folder.rglob("*.parquet"))


def there(lake: Lake) -> list[tuple[str, int, int, int, int]]:
    sql = "select run_id, attempt, rollout_id, step_id, rank from manifest order by step_id, rank"
    rows = lake.sql(sql, allow_partial=True).arrow().to_pylist()
    return [tuple(one.values()) for one in rows]


def named_data(lake: Lake) -> set[str]:
    rows = lake.sql("select path from manifest", allow_partial=True).arrow().to_pylist()
    return {row["path"] for row in rows}


@pytest.mark.parametrize(
    ("call", "late"), [("place", False), ("publish_if_absent", False), ("publish_if_absent", True)]
)
@pytest.mark.parametrize("number", range(1, 6))
def test_a_lake_that_fails_anywhere_holds_nothing_of_a_source_or_what_the_report_says(
    call: str, number: int, late: bool, dump: Path, tmp_path: Path
) -> None:
    lake = Lake.create(tmp_path / "lake")
    failing = Failing(tmp_path / "lake", call, number, OSError(28, "No space left"), late=late)
    source = attempt(failing, dump)
    lake.refresh()
    if failing.calls < number:
        assert source.status == "imported"
        return
    assert source.status in ("refused", "partial")
    assert "No space left" in source.problem
    assert there(lake) == sorted(source.captures, key=lambda one: one[3:])
    assert (source.status == "partial") is bool(source.captures)
    assert set(data_of(lake)) == named_data(lake)
    missing = len(source.captures) < 4
    if source.captures and missing:
        assert lake.replay().exit_code == 3  # no step is whole while the other is not begun
    again = attempt(LocalStore(tmp_path / "lake"), dump)
    assert (again.status, again.problem) == ("imported" if missing else "unchanged", "")
    lake.refresh()
    assert lake.replay().exit_code == 0
    assert len(there(lake)) == 4


@pytest.mark.parametrize("number", range(1, 6))
def test_an_import_that_is_killed_is_no_pass_and_is_completed_by_the_next(
    number: int, dump: Path, tmp_path: Path
) -> None:
    lake = Lake.create(tmp_path / "lake")
    failing = Failing(tmp_path / "lake", "publish_if_absent", number, Killed())
    with pytest.raises(Killed):
        attempt(failing, dump)
    lake.refresh()
    if there(lake):
        assert lake.replay().exit_code == 3
    assert attempt(LocalStore(tmp_path / "lake"), dump).status == "imported"
    lake.refresh()
    assert lake.replay().exit_code == 0
    assert attempt(LocalStore(tmp_path / "lake"), dump).status == "unchanged"


def test_a_capture_that_another_program_commits_meanwhile_is_held_against_this_one(
    dump: Path, tmp_path: Path
) -> None:
    lake = Lake.create(tmp_path / "lake")
    root = tmp_path / "lake"

    class Raced(LocalStore):
        """A lake into which another program imports before this one publishes."""

        other: ImportedSource | None = None

        def publish_if_absent(self, path: str, data: bytes) -> bool:
            if "/step." in path and self.other is None:
                self.other = attempt(LocalStore(root), theirs)
            return super().publish_if_absent(path, data)

    theirs = dump
    assert attempt(Raced(root), dump).status == "imported"
    lake.refresh()
    assert set(data_of(lake)) == named_data(lake)
    shutil.rmtree(root)
    lake = Lake.create(root)
    content = torch.load(dump, weights_only=True)
    content["samples"][0]["advantages"] += 1
    theirs = saved(content, tmp_path / "other" / "run" / "train_data" / "0.pt")
    mine = attempt(Raced(root), dump)
    assert mine.status == "refused"
    assert "committed by another program meanwhile, with other content" in mine.problem
    lake.refresh()
    assert set(data_of(lake)) == named_data(lake)

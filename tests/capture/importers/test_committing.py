"""An import into a lake that fails: nothing of a source is left, or the report says what is."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.bundles import copied, edited, signed
from tests.helpers.slime_dumps import saved, training
from trajreplay import Lake
from trajreplay.capture.importers import ImportedSource, ImportOptions, import_files, importer_of
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.layout import ENTRIES
from trajreplay.schema.localstore import LocalStore
from trajreplay.writer import CaptureBuilder
from trajreplay.writer.commit import Prepared

COUNTS = "select step_id, count(*), sum(reward) from steps group by 1 order by 1"
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
        unread: Errors of the reads of entries that follow it, the first one last.
    """

    def __init__(
        self,
        root: Path,
        call: str,
        number: int,
        error: BaseException,
        *,
        late: bool = False,
        unread: tuple[Exception, ...] = (),
    ) -> None:
        super().__init__(root)
        self._call, self._left, self._error, self._late = call, number, error, late
        self._unread = list(unread)
        self.calls = 0

    def _count(self, call: str) -> bool:
        if call != self._call:
            return False
        self.calls += 1
        return self.calls == self._left

    def temporary(self) -> str:
        if self._count("temporary"):
            raise self._error
        return super().temporary()

    def read(self, path: str, limit_bytes: int) -> bytes:
        if self.calls >= self._left and self._unread and path.startswith(ENTRIES):
            raise self._unread.pop()
        return super().read(path, limit_bytes)

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


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A train dump of two steps on a single rank."""
    content = training()
    for one in content["samples"]:
        one["data_parallel_rank"] = 0
    places = list(range(8))
    content["dp_shards"] = [
        {
            "rank": 0,
            "data_parallel_rank": 0,
            "sample_indices": places,
            "partition": places,
            "micro_batch_indices": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "num_microbatches": [1, 1],
            "global_batch_sizes": [4, 4],
        }
    ]
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


CANNOT_BE_READ = DatasetError("it cannot be read: Input/output error")


@pytest.mark.parametrize("unread", [(), (CANNOT_BE_READ,)])
@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "lost"), DatasetError("lost"), MemoryError("lost"), Killed()]
)
@pytest.mark.parametrize("number", [2, 4])
def test_an_entry_of_which_the_reply_was_lost_keeps_its_data_whatever_the_store_then_says(
    number: int,
    error: BaseException,
    unread: tuple[Exception, ...],
    dump: Path,
    tmp_path: Path,
) -> None:
    lake = Lake.create(tmp_path / "lake")
    failing = Failing(
        tmp_path / "lake", "publish_if_absent", number, error, late=True, unread=unread
    )
    if isinstance(error, (OSError, DatasetError)):
        source = attempt(failing, dump)
        assert "lost" in source.problem
        known = sorted(source.captures, key=lambda one: one[3:])
        lake.refresh()
        assert set(known) <= set(there(lake))
        assert len(known) == number - 1 - len(unread)  # what was not read again is not claimed
    else:
        with pytest.raises(type(error)):
            attempt(failing, dump)
        lake.refresh()
    assert len(there(lake)) == number - 1
    assert set(data_of(lake)) >= named_data(lake)
    again = attempt(LocalStore(tmp_path / "lake"), dump)
    assert again.status == "imported"
    lake.refresh()
    assert len(there(lake)) == 4
    assert lake.validate(deep=True).ok
    assert lake.replay().exit_code == 0


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


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("number", [2, 3])
def test_steps_of_one_rank_that_are_left_are_whole_and_said_and_the_next_import_adds_the_others(
    number: int, killed: bool, alone: Path, tmp_path: Path
) -> None:
    """No step is half there: of one rank, each step is a capture set of its own."""
    lake, left = Lake.create(tmp_path / "lake"), number - 2
    error = Killed() if killed else OSError(28, "No space left")
    failing = Failing(tmp_path / "lake", "publish_if_absent", number, error)
    if killed:
        with pytest.raises(Killed):
            import_files(failing, importer_of("slime"), [alone], OPTIONS)
    else:
        report = import_files(failing, importer_of("slime"), [alone], OPTIONS)
        (source,) = report.sources
        assert report.exit_code == 3
        assert source.status == ("partial" if left else "refused")
        assert source.captures == [("run", 0, 0, step, 0) for step in range(left)]
        assert "Import it again" in source.hint or not left
        assert source.samples == 4 * left
    lake.refresh()
    assert [one[3] for one in there(lake)] == list(range(left))
    assert set(data_of(lake)) == named_data(lake)
    assert lake.validate(deep=True).ok
    for step in range(left):
        found = lake.replay(steps=[(0, step)])
        assert [one.verdict for one in found.cohorts] == ["pass"]
    store = LocalStore(tmp_path / "lake")
    (again,) = import_files(store, importer_of("slime"), [alone], OPTIONS).sources
    assert (again.status, len(again.captures)) == ("imported", 2)
    lake.refresh()
    assert len(there(lake)) == 2
    assert lake.replay().exit_code == 0
    whole = Lake.create(tmp_path / "whole")
    import_files(LocalStore(tmp_path / "whole"), importer_of("slime"), [alone], OPTIONS)
    assert digests(lake) == digests(whole)


def digests(lake: Lake) -> list[tuple[object, ...]]:
    """What each column of each capture holds."""
    sql = 'select rollout_id, step_id, rank, "column", digest from checksums'
    rows = lake.sql(f'{sql} where "column" is not null').arrow().to_pylist()
    return sorted(tuple(row.values()) for row in rows)


def steps(folder: Path, count: int, *, of: str = "v1_healthy") -> list[Path]:
    """Bundles of a run, one of each of so many steps."""
    return [at_step(copied(of, folder / f"{step:02}"), step) for step in range(count)]


def at_step(bundle: Path, step: int) -> Path:
    """The same bundle as that of another step."""
    place = {"actor_step_id": {"rollout_id": 7, "step_id": step}}
    edited(bundle, "index.json", lambda tree: tree["identity"].update(place))
    edited(bundle, "COMPLETE.0", lambda tree: tree.update(place))
    return signed(bundle)


def test_captures_of_many_sources_share_files_and_each_is_what_it_is_alone(tmp_path: Path) -> None:
    bundles = steps(tmp_path / "in", 19)
    together, single = Lake.create(tmp_path / "together"), Lake.create(tmp_path / "single")
    for bundle in bundles:
        single.import_files("relax-bundle", bundle)
    report = together.import_files("relax-bundle", tmp_path / "in")
    assert {one.status for one in report.sources} == {"imported"}
    assert len(set(data_of(single))) == 19
    assert len(set(data_of(together))) == 3  # of 8, 8 and 3
    assert digests(together) == digests(single)
    for lake in (together, single):
        assert lake.validate(deep=True).ok
        assert lake.replay().exit_code == 0
    assert together.sql(COUNTS).arrow().to_pylist() == single.sql(COUNTS).arrow().to_pylist()
    assert together.import_files("relax-bundle", tmp_path / "in").exit_code == 0
    assert len(set(data_of(together))) == 3


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("call", ["place", "publish_if_absent"])
@pytest.mark.parametrize("number", [1, 2, 3, 7, 11])
def test_of_sources_that_share_a_file_each_is_there_or_not_and_the_report_says_which(
    call: str, number: int, killed: bool, tmp_path: Path
) -> None:
    steps(tmp_path / "in", 10)
    lake = Lake.create(tmp_path / "lake")
    error = Killed() if killed else OSError(28, "No space left")
    failing = Failing(tmp_path / "lake", call, number, error)
    importer = importer_of("relax-bundle")
    if not killed:
        report = import_files(failing, importer, [tmp_path / "in"])
        imported = [one for one in report.sources if one.status == "imported"]
        assert all("No space left" in one.problem for one in report.sources if one.problem)
        assert {one.status for one in report.sources} <= {"imported", "refused"}
        assert report.exit_code == (3 if failing.calls >= number else 0)
        lake.refresh()
        assert there(lake) == [one.captures[0] for one in imported]
    else:
        with contextlib.suppress(Killed):
            import_files(failing, importer, [tmp_path / "in"])
    lake.refresh()
    assert set(data_of(lake)) == named_data(lake)
    if there(lake):
        assert lake.validate(deep=True).ok
        assert lake.replay().exit_code == 0
    again = import_files(LocalStore(tmp_path / "lake"), importer, [tmp_path / "in"])
    assert again.exit_code == 0
    lake.refresh()
    assert len(there(lake)) == 10
    assert lake.replay().exit_code == 0


def test_what_cannot_be_committed_leaves_the_sources_that_it_would_share_a_file_with(
    tmp_path: Path,
) -> None:
    bundles = steps(tmp_path / "in", 3)
    lake = Lake.create(tmp_path / "lake")
    lake.import_files("relax-bundle", bundles[1])
    edited(bundles[1], "index.json", lambda tree: tree["config"].update(eps_clip=0.1))
    signed(bundles[1])
    other = tmp_path / "in" / "99"
    shutil.copytree(bundles[2], other)  # the same step once more: found equal
    report = lake.import_files("relax-bundle", tmp_path / "in")
    statuses = [one.status for one in report.sources]
    assert statuses == ["imported", "refused", "imported", "unchanged"]
    assert "is committed with other content" in report.sources[1].problem
    assert len(there(lake)) == 3
    assert set(data_of(lake)) == named_data(lake)


class ReadOnly(Failing):
    """A lake that is read-only from one of the changes on."""

    def _count(self, call: str) -> bool:
        super()._count(call)
        return self.is_now

    @property
    def is_now(self) -> bool:
        """Whether it is read-only by now."""
        return self.calls >= self._left


@pytest.mark.parametrize("of_a_bucket", [False, True])
@pytest.mark.parametrize("call", ["temporary", "place", "publish_if_absent"])
@pytest.mark.parametrize("number", [2, 7])
def test_a_lake_that_turns_read_only_ends_in_a_report_and_what_it_says_is_there(
    call: str, number: int, of_a_bucket: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(tmp_path / "in", 10)
    lake = Lake.create(tmp_path / "lake")
    read_only = OSError(errno.EROFS, "Read-only file system")
    error = DatasetError("Read-only file system") if of_a_bucket else read_only
    failing = ReadOnly(tmp_path / "lake", call, number, error)
    unlink = os.unlink

    def refused(path: str) -> None:
        if failing.is_now and str(path).startswith(lake.path):
            raise error if "/data/" in str(path) else read_only
        unlink(path)

    importer = importer_of("relax-bundle")
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        report = import_files(failing, importer, [tmp_path / "in"])
    assert len(report.sources) == 10
    assert report.exit_code == (3 if failing.is_now else 0)
    refusals = [one for one in report.sources if one.status != "imported"]
    assert {one.status for one in refusals} <= {"refused"}
    assert all("Read-only file system" in one.problem for one in refusals)
    lake.refresh()
    assert there(lake) == [one.captures[0] for one in report.sources if one.status == "imported"]
    assert set(data_of(lake)) >= named_data(lake)
    again = import_files(LocalStore(tmp_path / "lake"), importer, [tmp_path / "in"])
    assert again.exit_code == 0
    lake.refresh()
    assert len(there(lake)) == 10
    assert lake.validate(deep=True).ok
    assert lake.replay().exit_code == 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (MemoryError("no room"), "no room"),
        (RecursionError("too deep"), "too deep"),
    ],
)
def test_a_source_that_there_is_no_memory_for_is_refused_alone(
    error: Exception,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundles, which = steps(tmp_path / "in", 3), 1
    lake = Lake.create(tmp_path / "lake")
    prepare = CaptureBuilder.prepare

    def short(self: CaptureBuilder) -> Prepared:
        if self.key.step_id == which:
            raise error
        return prepare(self)

    with monkeypatch.context() as patch:
        patch.setattr(CaptureBuilder, "prepare", short)
        report = lake.import_files("relax-bundle", tmp_path / "in")
    assert report.exit_code == 3
    (refused,) = report.refused
    assert refused.status == "refused"
    assert refused.problem == f"{bundles[which]} cannot be read: {said}"
    assert (refused.captures, refused.samples, refused.tokens) == ([], 0, 0)
    assert [one[3] for one in there(lake)] == [step for step in range(3) if step != which]
    assert set(data_of(lake)) == named_data(lake)
    assert lake.import_files("relax-bundle", tmp_path / "in").exit_code == 0
    assert len(there(lake)) == 3


@pytest.mark.parametrize("number", range(1, 8))
@pytest.mark.parametrize("error", [MemoryError(), Killed()])
def test_what_ends_an_import_leaves_nothing_of_what_waited(
    error: BaseException, number: int, tmp_path: Path
) -> None:
    """Or it is the refusal of one source, where that is what there was no memory for."""
    steps(tmp_path / "in", 2)
    lake = Lake.create(tmp_path / "lake")
    failing = Failing(tmp_path / "lake", "temporary", number, error)
    report = None
    with contextlib.suppress(type(error)):
        report = import_files(failing, importer_of("relax-bundle"), [tmp_path / "in"])
    imported = [] if report is None else [one for one in report.sources if one.captures]
    if report is not None:
        assert there(lake) == [one.captures[0] for one in imported]
    assert set(data_of(lake)) == named_data(lake)
    assert list((tmp_path / "lake" / "_tmp").glob("*")) == []

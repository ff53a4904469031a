"""Processes that read for an import: what becomes of each source is what it is without them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.bundles import copied, edited, signed
from trajreplay import Lake
from trajreplay.capture.importers import ImportReport, batches, crew, import_files, importer_of
from trajreplay.capture.importers.crew import Batch, Crew
from trajreplay.schema.localstore import LocalStore

RELAX = importer_of("relax-bundle")
SOURCES = 40
KINDS = ["cohort", "again", "other", "broken", "unfinished"]


class Watched(Crew):
    """A crew that is looked at."""

    last: "Watched"

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        Watched.last, self.batches = self, list[Batch]()

    def start(self) -> None:
        super().start()
        while self._workers and not self.is_free and None in self.ended:
            self.listen(wait=True)  # or all is done before a worker is there

    def give(self, batch: Batch) -> None:
        self.batches.append(batch)
        super().give(batch)

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return [one.process.pid for one in self._workers]

    @property
    def ended(self) -> list[int | None]:
        """How each of its processes ended."""
        return [one.process.poll() for one in self._workers]


@pytest.fixture
def _workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, however many cores there are."""
    monkeypatch.setattr(crew, "_cores", lambda: 3)
    monkeypatch.setattr(crew, "WORTH_S", 0.0)
    monkeypatch.setattr(batches, "Crew", Watched)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles of many steps, some of several ranks, broken, or of a step that was there before."""
    root, chance = tmp_path_factory.mktemp("bundles"), random.Random(7)
    for place in range(SOURCES):
        folder = root / f"{place:03}"
        kind = chance.choice(
            ["healthy"] * 12 + ["cohort", "again", "other", "broken", "unfinished"]
        )
        if kind == "cohort":
            copied("v1_cohort_complete", folder)
            continue
        step = chance.randrange(place) if kind in ("again", "other") and place else place
        bundle = at_step(copied("v1_healthy", folder), step)
        if kind == "other":
            edited(bundle, "index.json", lambda tree: tree["config"].update(eps_clip=0.1))
            signed(bundle)
        elif kind == "broken":
            with (bundle / "payloads" / "log_probs.pt").open("ab") as file:
                file.write(b".")
        elif kind == "unfinished":
            (bundle / "COMPLETE").unlink()
    return root


def at_step(bundle: Path, step: int) -> Path:
    """The same bundle as that of another step."""
    place = {"actor_step_id": {"rollout_id": 7, "step_id": step}}
    edited(bundle, "index.json", lambda tree: tree["identity"].update(place))
    (shard,) = (one.name for one in bundle.glob("COMPLETE.*"))
    edited(bundle, shard, lambda tree: tree.update(place))
    return signed(bundle)


@dataclass(frozen=True)
class Alone:
    """An import without other processes."""

    lake: Path
    report: ImportReport
    facts: list[object]

    def told(self, lake: Path) -> list[dict[str, Any]]:
        """Its report, as if it were of another lake."""
        text = json.dumps([one.to_json() for one in self.report.sources])
        found: list[dict[str, Any]] = json.loads(text.replace(str(self.lake), str(lake)))
        return found


@pytest.fixture(scope="module")
def alone(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    lake = tmp_path_factory.mktemp("alone") / "lake"
    store = LocalStore(Lake.create(lake).path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crew, "WORTH_S", float("inf"))
        return Alone(lake, import_files(store, RELAX, [bundles]), facts(lake))


def facts(lake: Path) -> list[object]:
    """What a lake holds: its captures, and what each column of them holds."""
    opened = Lake.open(lake)
    columns = 'rollout_id, step_id, rank, "column", digest'
    sql = f'select {columns} from checksums where "column" is not null order by all'
    held = opened.sql(sql, allow_partial=True).arrow().to_pylist()
    sql = "select rollout_id, step_id, rank, producer, settings from manifest order by 1, 2, 3"
    return [held, opened.sql(sql, allow_partial=True).arrow().to_pylist()]


def files_of(lake: Path) -> set[str]:
    return {str(one.relative_to(lake)) for one in lake.rglob("*.parquet")}


def named_by(lake: Path) -> set[str]:
    rows = Lake.open(lake).sql("select path from manifest", allow_partial=True).arrow()
    return {row["path"] for row in rows.to_pylist()}


def clean(lake: Path) -> bool:
    """Whether nothing is there that no entry names."""
    unfinished = [one for one in (lake / "_tmp").glob("*") if one.is_file()]
    return not unfinished and files_of(lake) == named_by(lake)


@pytest.mark.usefixtures("_workers")
def test_sources_are_what_they_are_one_after_the_other(
    bundles: Path, alone: Alone, tmp_path: Path
) -> None:
    told: list[int] = []
    store = LocalStore(Lake.create(tmp_path / "lake").path)
    report = import_files(store, RELAX, [bundles], progress=lambda done, _: told.append(done))
    assert sum(batch.begun for batch in Watched.last.batches) > 0
    assert len(Watched.last.pids) == 2
    assert None not in Watched.last.ended
    statuses = {one.status for one in report.sources}
    assert statuses == {"imported", "refused", "unchanged"}
    told_alone = alone.told(tmp_path / "lake")
    assert json.loads(json.dumps([one.to_json() for one in report.sources])) == told_alone
    assert facts(tmp_path / "lake") == alone.facts
    assert clean(tmp_path / "lake")
    assert told == sorted(told)
    assert told[-1] == SOURCES
    again = import_files(store, RELAX, [bundles])
    assert {one.status for one in again.sources} == {"refused", "unchanged"}
    assert facts(tmp_path / "lake") == alone.facts


class Interrupting:
    """Progress during which something happens once a worker is at a source."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, _done: int, _all: int) -> None:
        begun = sum(batch.begun for batch in Watched.last.batches)
        if begun >= self.left > 0:
            self.left = 0
            self.happen()

    def happen(self) -> None:
        """What happens."""
        raise KeyboardInterrupt


@pytest.mark.usefixtures("_workers")
@pytest.mark.parametrize("number", [1, 9])
def test_a_worker_that_is_killed_is_named_and_the_rest_is_imported(
    number: int, bundles: Path, alone: Alone, tmp_path: Path
) -> None:
    class Killing(Interrupting):
        def happen(self) -> None:
            os.kill(Watched.last.pids[0], signal.SIGKILL)

    store = LocalStore(Lake.create(tmp_path / "lake").path)
    report = import_files(store, RELAX, [bundles], progress=Killing(number))
    assert Watched.last.ended[0] == -signal.SIGKILL
    differs = [
        (mine, theirs)
        for mine, theirs in zip(report.sources, alone.report.sources, strict=True)
        if mine.status != theirs.status
    ]
    killed = [one for one in report.sources if "ended by SIGKILL" in one.problem]
    assert len(killed) <= 1
    for one in killed:
        assert one.problem == f"{one.path}: the process that read it was ended by SIGKILL"
        assert (one.status, one.captures) == ("refused", [])
    assert len(differs) <= 2 * len(killed)  # and what would have been held against it
    assert import_files(store, RELAX, [bundles]).exit_code == 3
    assert len(named_by(tmp_path / "lake")) > 3
    assert facts(tmp_path / "lake")[0] == alone.facts[0] or killed


@pytest.mark.usefixtures("_workers")
@pytest.mark.parametrize("number", [12])
def test_an_import_that_is_interrupted_ends_its_workers_and_leaves_nothing_unfinished(
    number: int, bundles: Path, alone: Alone, tmp_path: Path
) -> None:
    lake = Lake.create(tmp_path / "lake")
    store = LocalStore(lake.path)
    with pytest.raises(KeyboardInterrupt):
        import_files(store, RELAX, [bundles], progress=Interrupting(number))
    assert None not in Watched.last.ended
    assert clean(tmp_path / "lake")
    assert lake.validate(deep=True).ok or not named_by(tmp_path / "lake")
    import_files(store, RELAX, [bundles])
    assert facts(tmp_path / "lake") == alone.facts


_IMPORT = """
import sys
from pathlib import Path
from trajreplay import Lake
from trajreplay.capture.importers import batches, crew

class Said(crew.Crew):
    def start(self):
        super().start()
        while not self.is_free and self._workers[0].process.poll() is None:
            self.listen(wait=True)
    def give(self, batch):
        super().give(batch)
        print(*(one.process.pid for one in self._workers), flush=True)

crew.WORTH_S, crew._cores, batches.Crew = 0.0, lambda: 2, Said
Lake.open(sys.argv[1]).import_files("relax-bundle", Path(sys.argv[2]))
"""


def is_running(pid: int) -> bool:
    """Whether a process is there that is none that ended and was not waited for."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no /proc")
def test_workers_end_with_an_import_that_is_killed(
    bundles: Path, alone: Alone, tmp_path: Path
) -> None:
    lake = Lake.create(tmp_path / "lake")
    command = [sys.executable, "-c", _IMPORT, lake.path, str(bundles)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = process.stdout.readline().split()
    process.kill()
    process.communicate()
    assert told, "no worker was given anything"
    ends = time.monotonic() + 60
    while any(map(is_running, map(int, told))) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(map(is_running, map(int, told)))
    import_files(LocalStore(lake.path), RELAX, [bundles])
    assert facts(tmp_path / "lake") == alone.facts


@pytest.mark.usefixtures("_workers")
@pytest.mark.parametrize(
    "command", [["/nowhere/python"], [sys.executable, "-c", "raise SystemExit(3)"]]
)
def test_an_import_does_without_workers_that_do_not_start(
    command: list[str],
    bundles: Path,
    alone: Alone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crew, "_command", lambda: (command, dict(os.environ)))
    store = LocalStore(Lake.create(tmp_path / "lake").path)
    report = import_files(store, RELAX, [bundles])
    assert [one.status for one in report.sources] == [one.status for one in alone.report.sources]
    assert facts(tmp_path / "lake") == alone.facts


@pytest.mark.usefixtures("_workers")
def test_what_is_read_soon_is_worth_no_process(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "WORTH_S", 3600.0)
    import_files(LocalStore(Lake.create(tmp_path / "lake").path), RELAX, [bundles])
    assert Watched.last.pids == []

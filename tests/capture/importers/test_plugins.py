"""Importers of other packages: found by their entry points, and wrong ones told by name."""

import copy
import json
import re
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cli import run
from tests.helpers.dumps import VERL, imported, rows
from tests.helpers.plugins import pip_install, write_package
from trajreplay import (
    CaptureError,
    Lake,
    ParallelCoordinates,
    ProducerInfo,
    SampleRecord,
    Settings,
    StageContract,
)
from trajreplay.capture.importers import Importer, import_files, importer_of, kinds, recognise
from trajreplay.capture.importers.foreign import guarded
from trajreplay.capture.importers.registry import GROUP
from trajreplay.schema.bundles.record import CaptureRecord, EventLine, EventRecord, Scalars
from trajreplay.schema.entry import LogProbOrigin

README = Path(__file__).parents[3] / "capture" / "importers" / "README.md"
STATED = {"profile": "verl"}
# Two prompts of two responses: what verl makes of their scores with a deviation of n - 1.
LINES = [
    {"id": "a-0", "prompt": "a", "mask": [1, 1], "score": 1.0, "used": 0.7071057811872435},
    {"id": "a-1", "prompt": "a", "mask": [1, 0], "score": 0.0, "used": -0.7071057811872435},
    {"id": "b-0", "prompt": "b", "mask": [1], "score": 2.0, "used": 0.7071062811866684},
    {"id": "b-1", "prompt": "b", "mask": [], "score": 0.0, "used": -0.7071062811866684},
]
HEAD = """
from trajreplay.capture.importers import CaptureRecord, Importer
from trajreplay import SampleRecord, Settings


def find(path):
    return [path] if path.suffix == ".acme" else []


def record(path, options):
    sample = SampleRecord("s-0", 0, 0, [])
    return [CaptureRecord("acme", 0, None, Settings(), (sample,))]
"""


def template() -> str:
    """The importer that the folder's page shows."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = (one for one in blocks if "ACME = Importer(" in one)
    return str(found)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package of the template."""
    pytest.importorskip("pip")
    points = {GROUP: {"acme": "acme_dumps:ACME"}}
    return pip_install(tmp_path_factory.mktemp("pip"), "acme_dumps", points, template())


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A file of the package's own kind."""
    path = tmp_path / "mine" / "7.acme"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(one) + "\n" for one in LINES))
    return path


@pytest.fixture
def acme(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package as installed."""
    monkeypatch.syspath_prepend(str(target))


@pytest.mark.usefixtures("acme")
def test_a_package_that_pip_installed_imports_its_files(lake: Lake, dump: Path) -> None:
    assert kinds()[-1] == "acme"
    source = imported(lake, "acme", dump, **STATED)
    assert (source.status, source.captures) == ("imported", [("mine", 0, 7, None, 0)])
    report = lake.replay()
    assert (report.verdict, report.exit_code) == ("pass", 0)
    assert rows(lake, "select sample_id, raw_reward from rollouts order by row") == [
        (one["id"], one["score"]) for one in LINES
    ]


@pytest.mark.usefixtures("acme")
def test_its_files_are_recognised_and_replayed_without_a_lake(dump: Path) -> None:
    assert recognise([dump]).kind == "acme"
    assert run("replay", dump, "--profile", "verl").code == 0
    assert run("replay", dump).code == 3
    dump.write_text(dump.read_text().replace("0.7071", "0.7072"))
    assert run("replay", dump, "--profile", "verl").code == 1


@pytest.mark.usefixtures("acme")
def test_what_its_files_lack_is_refused_by_name(lake: Lake, dump: Path) -> None:
    dump.write_text('{"id": "a-0", "prompt": "a", "mask": [2], "score": 1.0, "used": 0.0}\n')
    source = imported(lake, "acme", dump)
    assert source.status == "refused"
    assert "7.acme, line 1: mask is [2], expected a list of 0 and 1" in source.problem


WRONG = {
    "fails to find": (
        "def find(path): raise KeyError('odd')\nACME = Importer('acme', '', find, record)",
        r"the importer 'acme' from acme_wrong:ACME failed: KeyError: 'odd'",
    ),
    "finds what are no paths": (
        "ACME = Importer('acme', '', lambda path: [1], record)",
        r"found 1, expected paths",
    ),
    "fails to read": (
        "def record(path, options): return 1 / 0\nACME = Importer('acme', '', find, record)",
        r"the importer 'acme' from acme_wrong:ACME failed: ZeroDivisionError: division by zero",
    ),
    "reads what are no records": (
        "ACME = Importer('acme', '', find, lambda path, options: [{}])",
        r"gave \{\}, expected records of captures",
    ),
    "reads nothing": (
        "ACME = Importer('acme', '', find, lambda path, options: [])",
        r"gave no record",
    ),
    "gives samples that are none": (
        (
            "def record(*_): return [CaptureRecord('a', 0, None, Settings(), ({},))]\n"
            "ACME = Importer('acme', '', find, record)"
        ),
        r"gave a record of which samples is \(\{\},\), expected a tuple of SampleRecord",
    ),
    "is no importer": ("ACME = find", r"expected an Importer of that kind"),
    "is of another kind": (
        "ACME = Importer('other', '', find, record)",
        r"expected an Importer of that kind",
    ),
    "cannot be loaded": ("ACME", r"cannot be loaded: name 'ACME' is not defined"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_importer_is_told_by_name(
    what: str, lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, says = WRONG[what]
    folder = write_package(
        tmp_path / "site", "acme_wrong", {GROUP: {"acme": "acme_wrong:ACME"}}, HEAD + code
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "acme_wrong", raising=False)
    path = tmp_path / "x.acme"
    path.touch()
    assert re.search(says, problem_of(lake, path))
    found = run("import", "acme", path, "--lake", lake.path)
    assert (found.code, "Traceback" in found.err) == (3, False)
    assert lake.info().num_rows == 0


def test_two_captures_of_one_rank_are_refused_before_either_is_there(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
def twice(path, options):
    ours = [SampleRecord("s-0", 0, 0, []), SampleRecord("s-1", 0, 0, [])]
    return [CaptureRecord("acme", 0, None, Settings(), (one,)) for one in ours]
ACME = Importer("acme", "", find, twice)
"""
    points = {GROUP: {"acme": "acme_twice:ACME"}}
    folder = write_package(tmp_path / "site", "acme_twice", points, HEAD + code)
    monkeypatch.syspath_prepend(str(folder))
    path = tmp_path / "x.acme"
    path.touch()
    for store in (lake._store, None):
        (one,) = import_files(store, importer_of("acme"), [path]).sources
        assert one.status == "refused"
        assert "2 captures of run 'acme' rollout 0 rank 0: expected one of each" in one.problem
    assert lake.info().num_rows == 0


ANYTHING: list[Any] = [None, 1, 1.5, "x", b"x", True, [], [1], ([],), (1,), {}, {1: 2}, {"x": [1]}]
ANYTHING += [{"log_probs": "sampler"}, {"log_probs": object()}, object(), np.zeros(2), Path("x")]
HELD: dict[type, list[str]] = {
    one: [field.name for field in fields(one)]
    for one in (CaptureRecord, SampleRecord, Scalars, StageContract, ProducerInfo)
}
HELD |= {
    one: [field.name for field in fields(one)]
    for one in (ParallelCoordinates, LogProbOrigin, EventRecord, EventLine)
}


def forced(value: Any, **changes: Any) -> Any:
    """A record whose fields hold what its type forbids, as code without types gives it."""
    found = copy.copy(value)
    for name, one in changes.items():
        object.__setattr__(found, name, one)
    return found


@given(st.data())
def test_whatever_a_record_of_another_package_holds_its_source_alone_is_refused(
    data: st.DataObject,
) -> None:
    kind = data.draw(st.sampled_from(list(HELD)))
    changes = {data.draw(st.sampled_from(HELD[kind])): data.draw(st.sampled_from(ANYTHING))}

    def made(of: type, *args: Any, **named: Any) -> Any:
        return forced(of(*args, **named), **(changes if of is kind else {}))

    sample = made(SampleRecord, "s-0", 1, 2, [1])
    producer = made(ProducerInfo)
    capture = made(
        CaptureRecord,
        "acme",
        0,
        0,
        Settings(),
        (sample,),
        tensors={"log_probs": [[0.5]]},
        scalars=(made(Scalars, "loss.policy", {"loss": 1.0}, "rank", "sum"),),
        stages=(made(StageContract, "sample"),),
        origins={"log_probs": made(LogProbOrigin, "trainer")},
        producer=producer,
        parallel=made(ParallelCoordinates),
    )
    line = made(EventLine, "generated", "{}", None, 0)
    events = made(EventRecord, "acme", (line,), producer=producer)
    record = events if kind in (EventRecord, EventLine) else capture
    records = {"a": record, "b": CaptureRecord("healthy", 0, None, Settings(), ())}
    foreign = guarded(
        Importer(
            "acme", "", lambda _: [Path("a"), Path("b")], lambda path, _: [records[path.name]]
        ),
        "acme_wrong:ACME",
    )
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        first, second = import_files(lake._store, foreign, [Path(folder)]).sources
        assert second.status == "imported"
        assert bool(first.problem) is (first.status == "refused")
        assert lake.info().num_rows == 1 + (first.status == "imported" and record is capture)


@pytest.mark.parametrize("what", ["fails to find", "cannot be loaded"])
def test_a_wrong_importer_keeps_no_other_kind_from_its_files(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, says = WRONG[what]
    points = {GROUP: {"acme": "acme_wrong:ACME"}}
    folder = write_package(tmp_path / "site", "acme_wrong", points, HEAD + code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "acme_wrong", raising=False)
    assert recognise([VERL / "rollout_data_dir"]).kind == "verl"
    path = tmp_path / "x.acme"
    path.touch()
    with pytest.raises(CaptureError, match=says):
        recognise([path])


def problem_of(lake: Lake, path: Path) -> str:
    """What is said of a file of the kind acme, by the import or of the file."""
    try:
        return imported(lake, "acme", path).problem
    except CaptureError as error:
        return error.message


def test_a_kind_of_ours_is_no_other_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {GROUP: {"nemo-rl": "acme_same:ACME"}}
    folder = write_package(tmp_path / "site", "acme_same", points, "ACME = None")
    monkeypatch.syspath_prepend(str(folder))
    assert kinds().count("nemo-rl") == 1
    assert importer_of("nemo-rl").doc.startswith("Batches that NeMo-RL logs")

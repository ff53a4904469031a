"""Bundles whose JSON holds anything anywhere, and folders that are called like parts of one."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.bundles import CASES, copied, edited, signed
from tests.helpers.dumps import NEMO_RL
from trajreplay import CaptureError, Lake
from trajreplay.capture.importers import import_files, importer_of, recognise

ODD: tuple[Any, ...] = (None, True, -1, 1e300, "", "x", [], [1], [[]], {}, {"a": [1]}, 2**70)
SIGNED = ("manifest.json", "index.json", "expected.json")


def places(tree: Any) -> Iterator[tuple[Any, ...]]:
    """Where each value of a document is."""
    yield ()
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:3])
    for name, value in items if isinstance(tree, dict | list) else ():
        yield (name,)
        if isinstance(value, dict | list):
            yield from ((name, *rest) for rest in places(value) if rest)


def changed(tree: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    found = copy.deepcopy(tree)
    inside = found
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    return found


@pytest.mark.parametrize("name", ["v1_cohort_complete", "v2_healthy"])
def test_no_value_anywhere_in_a_bundle_ends_the_import(name: str, tmp_path: Path) -> None:
    bundle = copied(name, tmp_path)
    shutil.copytree(CASES / "v1_healthy", tmp_path / "a_healthy_one")
    files = [one for one in sorted(bundle.rglob("*")) if one.is_file() and one.suffix != ".pt"]
    whole = {one: one.read_text() for one in files}

    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def spoil(data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(files))
        tree = json.loads(whole[file])
        place = data.draw(st.sampled_from(list(places(tree))))
        spoilt = changed(tree, place, data.draw(st.sampled_from(ODD)))
        everywhere = data.draw(st.booleans())  # as every file of the name says it
        for one in files if everywhere else [file]:
            if one.name == file.name:
                one.write_text(json.dumps(spoilt))
        try:
            if file.name in SIGNED:
                with suppress(Exception):  # what is changed may be what is to be signed
                    signed(file.parent)
            report = import_files(None, importer_of("relax-bundle"), [tmp_path])
        finally:
            for one, text in whole.items():
                one.write_text(text)
        assert [one.status for one in report.sources if "healthy_one" in one.path] == ["checked"]

    spoil()


def test_an_anchor_that_is_no_number_is_refused(tmp_path: Path) -> None:
    bundle = copied("v1_cohort_complete", tmp_path)
    for path in sorted(bundle.rglob("COMPLETE*")):
        tree = json.loads(path.read_text())
        for one in (tree, *tree.get("shards", {}).values()):
            if "rollout_id" in one:
                one["rollout_id"] = [1]
        path.write_text(json.dumps(tree))
    (source,) = import_files(None, importer_of("relax-bundle"), [bundle]).sources
    assert source.status == "refused"
    assert "rollout_id is [1]" in source.problem


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "payloads/", "rank-0/"])
def test_one_name_of_a_bundle_makes_none(name: str, tmp_path: Path) -> None:
    logs = Path(shutil.copytree(NEMO_RL, tmp_path / "logs"))
    odd = logs / "wandb" / name
    odd.parent.mkdir()
    odd.mkdir() if name.endswith("/") else odd.write_text("{}")
    assert recognise([logs]).kind == "nemo-rl"
    with pytest.raises(CaptureError, match="nothing at or below it"):
        recognise([logs / "wandb"])


@pytest.mark.parametrize("left", ["manifest.json", "payloads", "COMPLETE"])
def test_what_is_left_of_a_bundle_among_others_is_refused(left: str, tmp_path: Path) -> None:
    copied("v1_healthy", tmp_path)
    bundle = copied("v2_healthy", tmp_path)
    for path in bundle.iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with Lake.of_files(tmp_path) as lake:
        assert lake.imported is not None
        assert {Path(one.path).name: one.status for one in lake.imported.sources} == {
            "v1_healthy": "imported",
            "v2_healthy": "refused",
        }


@pytest.mark.parametrize("signed_by", ["COMPLETE", "COMPLETE.0", ""])
def test_ranks_are_a_cohort_where_they_are_bundles_or_signed(
    signed_by: str, tmp_path: Path
) -> None:
    bundle = copied("v1_cohort_complete", tmp_path)
    for path in bundle.iterdir():
        if path.is_file() and path.name != signed_by:
            path.unlink()
    if signed_by:
        for rank in (0, 1):
            shutil.rmtree(bundle / f"rank-{rank}")
            (bundle / f"rank-{rank}").mkdir()
    for path in (tmp_path, bundle / "rank-1"):
        assert list(importer_of("relax-bundle").find(path)) == [bundle]


def _of_sample(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda tree: tree["samples"][0].update({name: value})


MESSAGES: dict[str, tuple[str, Any, str]] = {
    "a mask of 2": (
        "index.json",
        _of_sample("loss_mask", [2, 1]),
        "samples[0]: loss_mask is [2, 1], expected a list of 0 and 1",
    ),
    "a mask below": (
        "index.json",
        _of_sample("loss_mask", [-1, 1]),
        "samples[0]: loss_mask is [-1, 1], expected a list of 0 and 1",
    ),
    "samples that are none": (
        "index.json",
        lambda tree: tree.update(samples={}),
        "index.json: samples is {}, expected a list of objects",
    ),
    "a stage that is none": (
        "expected.json",
        lambda tree: tree.update({"loss.odd": {"x": 1}}),
        "expected.json: unknown stage 'loss.odd'",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("case", ["v1_healthy", "v2_healthy"])
def test_a_problem_is_told_with_its_file_and_what_was_expected(
    case: str, name: str, tmp_path: Path
) -> None:
    file, edit, message = MESSAGES[name]
    bundle = copied(case, tmp_path)
    edited(bundle, file, edit)
    signed(bundle)
    (source,) = import_files(None, importer_of("relax-bundle"), [bundle]).sources
    assert source.status == "refused"
    assert message in source.problem
    assert source.problem.startswith(str(bundle))

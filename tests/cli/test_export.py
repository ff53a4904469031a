"""`trajreplay export`: what goes to stdout, to stderr, and into the folder."""

import os
from pathlib import Path

import pytest

from tests.helpers.bundles import CASES
from tests.helpers.captures import sample, start
from tests.helpers.cli import run
from trajreplay import Lake


@pytest.fixture(autouse=True)
def _lake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    monkeypatch.chdir(tmp_path)
    assert run("import", "relax-bundle", CASES / "v1_pr65_fault", CASES / "v1_loss_only").code == 0


def test_bundles_are_written_and_named() -> None:
    found = run("export", "bundle", "--run", "v1_pr65_fault", "-o", "out")
    assert (found.code, found.out) == (0, "out/v1_pr65_fault\n")
    note, done = found.err.splitlines()
    assert note.startswith("Note: v1_pr65_fault: a bundle has no place for these")
    assert done == "1 bundle written"
    assert run("replay", "out/v1_pr65_fault").code == 1


def test_one_file_for_mail_is_replayed() -> None:
    found = run("export", "bundle", "--where", "run_id='v1_loss_only'", "-o", "x.tar.zst", "-q")
    assert (found.code, found.out, found.err) == (0, "x.tar.zst\n", "")
    assert run("replay", "x.tar.zst").code == 0


def test_a_small_lake_is_written_and_verified() -> None:
    found = run("export", "lake", "--step", "7:0", "-o", "small")
    assert (found.code, found.out) == (0, "small\n")
    assert found.err == "2 captures copied, every digest verified\n"
    assert run("validate", "--lake", "small").code == 0


@pytest.mark.parametrize("kind", ["bundle", "lake"])
@pytest.mark.parametrize("place", ["lake", "lake/out", "lake/data/out", "lake/x.tar.zst", "link"])
def test_nothing_is_exported_into_a_lake(kind: str, place: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("lake")
    before = sorted(tmp_path.rglob("*"))
    found = run("export", kind, "--step", "7:0", "--lake", "lake", "-o", place)
    assert found.code in (2, 3)
    assert found.err.startswith(("Error:", "Usage:"))
    assert sorted(tmp_path.rglob("*")) == before


def test_usage_is_checked(tmp_path: Path) -> None:
    assert run("export", "bundle", "-o", "out", "--redact", "prompt=hash").code == 2
    assert run("export", "lake", "-o", "out", "--redact", "prompt=keep").code == 2
    assert run("export", "lake", "-o", "out", "--step", "7:0", "--rollout", "7").code == 2
    assert run("export", "lake", "-o", "out", "--rollout", "9").code == 2
    assert not (tmp_path / "out").exists()


def test_what_a_bundle_has_no_place_for_is_said_once_for_all_ranks(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "ranks")
    for rank in range(2):
        samples = [sample(0, sample_id=f"s-{rank}", truncated=False, group_size=1)]
        with start(lake, rank=rank, expected_ranks=[0, 1], rollout_id=3) as capture:
            capture.samples(samples)
    found = run("export", "bundle", "--lake", lake.path, "-o", tmp_path / "out")
    assert found.code == 0
    (note,) = (line for line in found.err.splitlines() if "no place" in line)
    assert note.endswith("which are left out: group_size; truncated")

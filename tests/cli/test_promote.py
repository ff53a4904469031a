"""`trajreplay promote`: what goes to stdout, to stderr, and into the lake."""

import os
from pathlib import Path

import pytest

from tests.helpers.captures import entries_of, record, sample
from tests.helpers.cli import run
from trajreplay import Lake
from trajreplay.capture.writing.spool import prepare


@pytest.fixture(autouse=True)
def _spool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    monkeypatch.delenv("TRAJREPLAY_LAKE", raising=False)
    monkeypatch.chdir(tmp_path)
    Lake.create("lake")
    prepare("spool", "lake")
    for rollout in range(2):
        record(Lake.open("spool"), lambda one: one.samples([sample()]), rollout_id=rollout)


def test_what_waits_is_said_and_then_brought_into_the_lake_of_the_spool() -> None:
    found = run("promote", "spool", "-n")
    assert (found.code, found.out, found.err) == (
        0,
        f"2 captures for {Path('lake').resolve()}\n",
        "",
    )
    assert entries_of(Lake.open("lake")) == []
    found = run("promote", "spool")
    assert (found.code, found.out, found.err) == (0, "2 captures in 1 file\n", "")
    assert len(entries_of(Lake.open("lake"))) == 2
    found = run("promote", "spool")
    assert (found.code, found.out, found.err) == (0, "0 captures in 0 files\n", "")


def test_a_lake_that_was_moved_is_named() -> None:
    Path("lake").rename("moved")
    found = run("promote", "spool")
    assert (found.code, found.out) == (3, "")
    assert "is not a lake" in found.err
    found = run("promote", "spool", "--lake", "moved")
    assert (found.code, found.out) == (0, "2 captures in 1 file\n")


def test_another_lake_is_not_taken_by_mistake() -> None:
    Lake.create("other")
    found = run("--lake", "other", "promote", "spool")
    assert (found.code, found.out) == (2, "")
    assert "name one with --lake after the verb" in found.err
    assert entries_of(Lake.open("other")) == []


def test_what_stays_is_said_with_the_reason() -> None:
    record(Lake.open("lake"), lambda one: one.samples([sample(3)]), rollout_id=1)
    found = run("promote", "spool")
    assert (found.code, found.out) == (3, "1 capture in 1 file\n")
    assert found.err.startswith("Stays in the spool: _manifest/entries/run_id=r/")
    assert "is committed with other content" in found.err
    assert "Hint: " in found.err


def test_a_folder_that_is_no_spool_is_refused() -> None:
    for options in ([], ["-n"]):
        found = run("promote", "lake", *options)
        assert (found.code, found.out) == (3, "")
        assert "lake is no spool" in found.err

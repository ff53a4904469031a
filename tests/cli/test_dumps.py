"""Dumps on the command line: looked at, validated and replayed without a lake."""

import json
from pathlib import Path

import pytest

from tests.helpers.cli import run
from tests.helpers.dumps import AREAL, EXPORT, NEMO_RL, TRANSPORT, TRL, VERL

ALONE = {
    "nemo-rl": (NEMO_RL / "train_data_step1.jsonl", "8 samples, 20 tokens"),
    "prime-rl-export": (EXPORT, "3 samples, 4 tokens"),
    "prime-rl-rollout": (TRANSPORT, "3 samples, 4 tokens"),
    "verl": (VERL / "rollout_data_dir", "8 samples, 0 tokens"),
    "trl": (TRL / "completions_00001.parquet", "64 samples, 0 tokens"),
    "areal": (AREAL, "4 samples, 9 tokens"),
}
WEIGHTS = "reward.weights=r_digit:1;r_len:0.5"


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", ALONE)
def test_a_dump_is_looked_at_without_a_lake(kind: str, tmp_path: Path) -> None:
    path, says = ALONE[kind]
    shown = run("inspect", path)
    assert shown.code == 0
    assert says in shown.out
    assert run("validate", path, "--deep").code == 0
    found = run("replay", path, "--format", "json")
    report = json.loads(found.out)
    assert (found.code, report["verdict"]) == (3, "unverified")
    assert list(tmp_path.iterdir()) == []


def test_what_is_stated_is_replayed() -> None:
    said = ("--profile", "nemo-rl", "--group-by-position", "4")
    assert run("replay", NEMO_RL / "train_data_step1.jsonl", *said).code == 0
    other = run("replay", TRL, "--profile", "trl", "--group-by-position", "4", "--state", WEIGHTS)
    assert other.code == 0
    assert "completions_00002.parquet hold the same rows" in other.err


def test_a_dump_is_imported_and_imported_again() -> None:
    for status in ("imported", "unchanged"):
        found = run("import", "areal", AREAL, "--format", "json")
        (source,) = json.loads(found.out)["sources"]
        assert (found.code, source["status"], source["samples"]) == (0, status, 4)

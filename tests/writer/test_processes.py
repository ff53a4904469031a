"""Writers in other processes: killed at any moment, or 64 at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.captures import data_files, verify
from tests.helpers.writers import capture
from trajreplay import Lake
from trajreplay.schema.localstore import LocalStore

ROOT = Path(__file__).parents[2]
KILLS, RANKS, STEPS = 50, 64, 2


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def program(*arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.writers", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_writer_killed_fifty_times_leaves_only_whole_captures(lake: Lake) -> None:
    committed = 0
    with program("kill", lake.path) as writer:
        assert writer.stdin
        assert writer.stdout
        for _ in range(KILLS):
            # The last committed step is captured again: a retry of what may have been lost.
            print(max(0, committed - 1), file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "killed\n"
            steps = [entry.key.step_id for entry in verify(lake)]
            assert sorted(steps, key=lambda step: step or 0) == list(range(len(steps)))
            assert len(steps) >= committed
            committed = len(steps)
        writer.stdin.close()
    assert writer.returncode == 0
    capture(lake, step_id=committed, rank=0, ranks=1)
    entries = verify(lake)
    assert len(entries) == committed + 1 > KILLS // 2  # two captures a writer, one of them again
    named = {file.path for entry in entries for file in entry.files}
    assert named <= data_files(lake)


def test_sixty_four_writers_at_once_commit_every_capture_once(lake: Lake) -> None:
    with program("many", lake.path, RANKS, STEPS) as writers:
        out, _ = writers.communicate(timeout=120)
    assert out == "0\n"
    entries = verify(lake)
    keys = {(entry.key.step_id, entry.key.rank) for entry in entries}
    assert keys == {(step, rank) for step in range(STEPS) for rank in range(RANKS)}
    assert len(entries) == RANKS * STEPS
    assert {file.path for entry in entries for file in entry.files} == data_files(lake)
    assert not list(LocalStore(lake.path).list("_tmp"))


def test_a_trainer_that_captures_arrays_loads_no_torch_and_no_duckdb() -> None:
    with program("loaded") as writer:
        assert writer.communicate(timeout=60)[0] == "[]\n"

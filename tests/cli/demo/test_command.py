"""The demo as a newcomer runs it: each fault is injected into a real training, and found."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.cli import INTERRUPTIBLE
from trajreplay import CaptureError
from trajreplay.cli.demo.config import TrainingConfig
from trajreplay.cli.demo.faults import FAULTS
from trajreplay.cli.demo.launch import train

ROLLOUTS = 4
FIRST_FAULTY = 1
PATIENCE_S = 120


def run_demo(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if name != "TRAJREPLAY_LAKE"}
    return subprocess.run(
        [sys.executable, "-m", "trajreplay", "demo", "--rollouts", f"{ROLLOUTS}", *options],
        cwd=folder,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "none"])
def test_the_injected_fault_is_found_where_it_begins(fault: str, tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--fault", fault)
    expected = FAULTS[fault]
    assert (done.returncode, done.stderr) == (0, "")
    assert f"first divergent stage: {expected.stage}" in done.stdout
    assert (
        f"Found: exactly that. {expected.field} is the first to differ, "
        f"at stage {expected.stage} of rollout {FIRST_FAULTY}."
    ) in done.stdout
    assert (tmp_path / "demo-lake" / "lake.json").is_file()


def test_a_healthy_training_passes_and_learns_and_repeats_itself(tmp_path: Path) -> None:
    first = run_demo(tmp_path, "--fault", "none", "--rollouts", "6")
    assert (first.returncode, first.stderr) == (0, "")
    assert "Found: nothing, as it should be." in first.stdout
    assert "diverged" not in first.stdout
    learned = re.search(r"Mean raw reward ([0-9.]+) at first, ([0-9.]+) at last", first.stdout)
    assert learned is not None
    assert float(learned[2]) > 2 * float(learned[1])

    again = run_demo(tmp_path, "--fault", "none", "--rollouts", "6", "--force")
    assert again.stdout == first.stdout


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*INTERRUPTIBLE, "demo", "--lake", "lake", "--rollouts", "500"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        entries = tmp_path / "lake" / "_manifest" / "entries"
        wait_until(lambda: process.poll() is not None or any(entries.rglob("*.json")))
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (stdout, stderr.strip()) == (b"", b"Interrupted.")
    assert process.returncode == 130
    wait_until(lambda: not is_alive(process.pid))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_that_fails_ends_the_training_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"rank [01] of the demo training failed: .*is not a lake"
    ):
        list(train(TrainingConfig(), tmp_path))


def test_a_lake_is_not_overwritten_unasked(tmp_path: Path) -> None:
    lake = tmp_path / "demo-lake"
    lake.mkdir()
    (lake / "lake.json").write_text("{}")
    done = run_demo(tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert "demo-lake is a lake already" in done.stderr
    assert "--force" in done.stderr


def test_a_folder_that_is_no_lake_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "work.txt").write_text("kept")
    done = run_demo(tmp_path, "--lake", "precious", "--force")
    assert (done.returncode, done.stdout) == (3, "")
    assert "precious is not empty and no lake" in done.stderr
    assert (tmp_path / "precious" / "work.txt").read_text() == "kept"


def test_an_unknown_fault_is_a_usage_error(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--fault", "gremlins")
    assert (done.returncode, done.stdout) == (2, "")
    assert "physical-batch" in done.stderr

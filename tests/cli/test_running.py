"""A command that is run: each signal reaches it once, whether it was sent to one or to a group."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trajreplay.cli.running import NotRunnable, NotThere, check_runnable

# Counts the signals that it gets, until it is told by a file to stop.
COUNTING = """
import os, signal, sys, time
found = []
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(one, lambda number, _: found.append(number))
print("ready", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until and not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print(*found, flush=True)
"""
RUNNING = """
import sys
from trajreplay.cli.running import run_command
sys.exit(run_command([sys.executable, "-c", *sys.argv[1:]], {}).code)
"""
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


class Running:
    """A program that runs a counting command, in a process group of its own."""

    def __init__(self, folder: Path) -> None:
        self.stop = folder / "stop"
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUNNING, COUNTING, str(self.stop)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def counted(self) -> list[int]:
        """The signals that the command got."""
        time.sleep(1.2)  # longer than it may take to be passed on
        self.stop.touch()
        out, err = self.process.communicate(timeout=60)
        assert (self.process.returncode, err) == (0, "")
        return [int(one) for one in out.split()]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_group_reaches_the_command_once(number: int, tmp_path: Path) -> None:
    running = Running(tmp_path)
    os.killpg(running.process.pid, number)
    assert running.counted() == [number]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_program_alone_is_passed_on_once(number: int, tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.process.send_signal(number)
    assert running.counted() == [number]


def test_one_to_the_group_takes_nothing_from_a_later_one_to_the_program(tmp_path: Path) -> None:
    running = Running(tmp_path)
    os.killpg(running.process.pid, signal.SIGTERM)
    os.killpg(running.process.pid, signal.SIGINT)
    time.sleep(2.5)  # the two may be told apart from what comes now
    running.process.send_signal(signal.SIGTERM)
    assert sorted(running.counted()) == sorted([signal.SIGTERM, signal.SIGINT, signal.SIGTERM])


def test_a_program_that_is_killed_leaves_no_sentinel(tmp_path: Path) -> None:
    running = Running(tmp_path)
    running.process.kill()
    running.stop.touch()
    running.process.communicate(timeout=60)  # ends once all who have its stderr did


# Sends itself a signal while the command is being started, and starts it then.
EARLY = """
import os, signal, subprocess, sys
from trajreplay.cli import running
start = subprocess.Popen
def starting(command, **options):
    if command[1] == "-c":
        os.kill(os.getpid(), signal.SIGTERM)
    return start(command, **options)
running.subprocess.Popen = starting
sys.exit(running.run_command([sys.executable, "-c", "import time; time.sleep(60)"], {}).code)
"""


def test_a_signal_while_the_command_starts_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM, "the program lives on to say so"


def test_what_cannot_be_run_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    for name in ("tool", "notes"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "tool").chmod(0o755)
    check_runnable("tool")
    check_runnable("bin/tool")
    for name in ("notes", "bin/notes", "./bin"):
        with pytest.raises(NotRunnable) as refused:
            check_runnable(name)
        assert (refused.value.exit_code, type(refused.value)) == (126, NotRunnable)
    for name in ("", "absent", "bin/absent", "bin"):
        with pytest.raises(NotThere):
            check_runnable(name)

"""The command line as tests call it: in this process, or as a program of its own."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

from trajreplay.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """What a run of the command line left."""

    code: int
    out: str
    err: str


def run(*args: str | Path, stdin: str | bytes | None = None, **environment: str) -> Outcome:
    """Run the command line in this process; its own TRAJREPLAY_LAKE counts, not the machine's."""
    runner = CliRunner(env={"TRAJREPLAY_LAKE": None, "NO_COLOR": None, **environment})
    result = runner.invoke(main, [str(one) for one in args], input=stdin)
    return Outcome(result.exit_code, result.stdout, result.stderr)


def run_bytes(*args: str | Path) -> bytes:
    """Run the command line and return what it wrote to stdout, byte for byte."""
    return (
        CliRunner(env={"TRAJREPLAY_LAKE": None})
        .invoke(main, [str(one) for one in args])
        .stdout_bytes
    )


def program(*args: str | Path, cwd: Path | None = None, **environment: str) -> Outcome:
    """Run the command line as a program."""
    done = subprocess.run(
        [sys.executable, "-m", "trajreplay", *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        timeout=120,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


_HEARING = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from trajreplay.cli.main import main; main()"
)
# The command line where Ctrl-C is heard: what starts in the background is born deaf to it.
INTERRUPTIBLE = (sys.executable, "-c", _HEARING)


def interrupted(*args: str | Path, tmp: Path) -> Outcome:
    """Run the command line as a program, and interrupt it once a statement of its own runs.

    Args:
        args: The command line.
        tmp: Folder for temporary files, without any of the program's.
    """
    running = subprocess.Popen(
        [*INTERRUPTIBLE, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp)},
    )
    try:
        while running.poll() is None and not list(tmp.glob(f"trajreplay-{running.pid}-*")):
            time.sleep(0.05)
        time.sleep(0.5)  # the database is open; the statement follows at once
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=20)
    finally:
        running.kill()
        running.communicate()
    return Outcome(running.returncode, out, err)

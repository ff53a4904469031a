"""The command line as tests call it: in this process, or as a program of its own."""

import os
import subprocess
import sys
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

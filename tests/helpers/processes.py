"""Several processes of one test program, and a port for them to meet at."""

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port of the loopback interface that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_all(
    module: str, arguments: Sequence[Sequence[object]], timeout_s: float = 120.0
) -> list[int]:
    """Run a module once for each list of arguments, at the same time; all must succeed.

    Returns:
        The numbers of their processes.
    """
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", module, *map(str, given)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for given in arguments
    ]
    try:
        output = [one.communicate(timeout=timeout_s)[0] for one in programs]
    finally:
        for one in programs:
            one.kill()
            one.wait()
    assert [one.returncode for one in programs] == [0] * len(programs), "\n".join(output)
    return [one.pid for one in programs]

"""Whether a signal came to this program alone, or to all of its process group."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

# Tells of each signal its number and when it came, and ends with the program that started it.
_TELL = """
import os, signal, struct, sys, time
def tell(number, frame=None):
    os.write(1, struct.pack("=Bd", number, time.monotonic()))
for one in map(int, sys.argv[1:]):
    signal.signal(one, tell)
tell(0)
sys.stdin.buffer.read()
"""
_TOLD = struct.Struct("=Bd")
_READY = 0
_START_S = 30.0
_WAIT_S = 0.5  # a signal to a group comes to each of its processes by one call
_STALE_S = 2.0  # one that came before that is another


class Sentinel:
    """A process beside the command that says which signals came to the whole group.

    A terminal sends Ctrl-C to a group, and batch systems signal every process of a job: the
    command has such a signal already, and would take a second one for a second order.

    Args:
        numbers: The signals.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._told: dict[int, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # without one every signal is passed on
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TELL, *map(str, numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._hear(_READY, _START_S)

    def heard(self, number: int) -> bool:
        """Whether a signal that this program has got came to its group, too."""
        return self._hear(number, _WAIT_S)

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with suppress(OSError):
                self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._process = None

    def _hear(self, number: int, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while True:
            now = time.monotonic()
            if now - self._told.pop(number, -_STALE_S) < _STALE_S:
                return True
            # Shortly: another signal may be asked for in between, and take in what this waits for.
            if now >= until or not self._listen(min(until - now, 0.05)):
                return False

    def _listen(self, wait_s: float) -> bool:
        """Take in what it tells within a time; whether it is still there to tell anything."""
        if self._process is None:
            return False
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        if not select.select([pipe], [], [], wait_s)[0]:
            return True
        found = os.read(pipe, _TOLD.size * 256)
        self._told |= dict(_TOLD.iter_unpack(found))
        return bool(found)

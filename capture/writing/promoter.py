"""The thread that brings captures from the spool of this machine to the lake."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

from trajreplay.capture.reasons import warn
from trajreplay.capture.writing.spool import BusyError, promoted, waiting
from trajreplay.capture.writing.threads import leave_alone, start
from trajreplay.schema.errors import TrajReplayError

THREAD = "trajreplay-promoter"
_PROMOTED_AT = 32  # captures of this process, by which a file is worth its while
_PROMOTED_EVERY_S = 30.0
_GRACE_S = 0.05


class Promoter:
    """Promotes what this machine spools while a training runs, in a thread of its own.

    The thread that writes never waits for the lake. What is committed to the spool is not lost
    when a process dies: the next one with this spool promotes it, or `trajreplay promote`.

    Args:
        folder: The spool, prepared.
        lake: The lake.
        mine: The run, attempt and rank of this process; others of the machine share the spool.
        failed: Is told what went wrong.
    """

    def __init__(
        self,
        folder: str,
        lake: str,
        mine: tuple[str, int, int],
        failed: Callable[[Exception], None],
    ) -> None:
        self._folder, self._lake, self._mine, self._failed = folder, lake, mine, failed
        self._fresh = 0  # captures since it was looked at
        self._deadline = math.inf
        self._asked = threading.Event()
        self._pid = os.getpid()
        self._thread = start(THREAD, self._run)

    def written(self) -> None:
        """A capture was committed to the spool."""
        self._fresh += 1
        if self._fresh >= _PROMOTED_AT:
            self._asked.set()

    def close(self, timeout_s: float) -> bool:
        """Promote what is left, as far as time allows.

        Returns:
            Whether the lake holds all that this process spooled.
        """
        if self._pid != os.getpid():  # a forked child has no such thread
            return True
        self._deadline = time.monotonic() + timeout_s
        self._asked.set()
        self._thread.join(timeout_s + _GRACE_S)
        leave_alone(self._thread)
        try:
            return not self._left() and not self._thread.is_alive()
        except (TrajReplayError, OSError) as error:  # the spool is away, and with it what it held
            self._failed(error)
            return False

    def _left(self) -> int:
        keys = waiting(self._folder)
        left = sum((one.run_id, one.attempt, one.rank) == self._mine for one in keys)
        if left:
            warn(
                f"{left} captures wait in {self._folder} and are not in {self._lake} yet; to bring "
                f"them there: trajreplay promote {self._folder}"
            )
        return left

    def _run(self) -> None:
        while self._deadline == math.inf:
            self._promote(0.0)  # at first what another process may have left
            self._asked.wait(_PROMOTED_EVERY_S)
            self._asked.clear()
        self._promote(max(0.0, self._deadline - time.monotonic()))

    def _promote(self, wait_s: float) -> None:
        self._fresh = 0
        try:
            found = promoted(
                self._folder, self._lake, wait_s=wait_s, deadline=lambda: self._deadline
            )
            for problem in found.problems:
                self._failed(problem)
        except BusyError:
            return  # it takes mine, too
        except Exception as error:  # noqa: BLE001 - it stays in the spool, and training goes on
            self._failed(error)

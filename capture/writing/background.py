"""The thread that writes captures: one a recorder, nice, bounded by bytes, never in the way."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from trajreplay.capture.reasons import WarnedOnce, kind_of, reason_of
from trajreplay.capture.taking.heartbeat import resolved
from trajreplay.capture.writing.fates import commit_beside, note_fates
from trajreplay.capture.writing.handoff import Account, Handoff
from trajreplay.capture.writing.notes import Notes
from trajreplay.capture.writing.threads import leave_alone, start
from trajreplay.schema.events import dump_detail

THREAD = "trajreplay-writer"
_GRACE_S = 1.0  # for the entries that say what was dropped, once the time to write it is over


class Background:
    """Writes what is handed over, in order.

    Args:
        lake: The lake, or a spool.
        queue_bytes: Most that may wait.
        wait_s: How long `put` may wait for room.
        close_s: How long the end of the program may wait.
        ring_bytes: Most that may wait of what the ring held.
        strict: Whether to keep what goes wrong for who calls.
        make_ready: Is called before the thread waits for a capture.
        written: Is called whenever a capture was committed.

    Attributes:
        warn: Warns of what goes wrong.
        errors: What went wrong while writing, where that is asked for.
        closing_s: How long the end waited. Seconds.
    """

    def __init__(
        self,
        lake: str,
        *,
        queue_bytes: int,
        wait_s: float,
        close_s: float,
        ring_bytes: int = 0,
        strict: bool = False,
        make_ready: Callable[[], None] = lambda: None,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        self._lake, self._strict, self._written = lake, strict, written
        self._close_s, self._make_ready = close_s, make_ready
        self._wait_s = wait_s
        self._limits: dict[Account, int] = {"queue": queue_bytes, "ring": ring_bytes}
        self._waiting: dict[Account, int] = {"queue": 0, "ring": 0}
        # To put something there wakes the thread for less than a condition takes.
        self._queue: SimpleQueue[tuple[Handoff, Account] | None] = SimpleQueue()
        self._unwritten = 0
        self._notes = Notes(self._commit)
        self._closing = self._hurried = self._ended = False
        self._changed = threading.Condition()
        self.warn = WarnedOnce()
        self._pid = os.getpid()
        self.errors: list[Exception] = []
        self.closing_s = 0.0
        self._thread = start(THREAD, self._run)
        atexit.register(self._at_exit)

    def put(self, handoff: Handoff, account: Account = "queue") -> str:
        """Hand a capture over; returns why its data was given up, or nothing.

        Args:
            handoff: The capture.
            account: Which bound its memory counts for: that of the queue, or that of the ring,
                where it was in the ring before.
        """
        size = handoff.held_bytes
        with self._changed:
            if self._closing or self._ended or self._pid != os.getpid():
                handoff.release()  # nobody is there to note it in the lake
                return "the recorder was closed before"
            if not self._has_room(size, account) and not self._changed.wait_for(
                lambda: self._has_room(size, account), self._wait_s
            ):
                reason = (
                    f"{account} full: {self._waiting[account]} bytes wait to be written, {size} "
                    f"more would exceed {self._limits[account]}"
                )
            else:
                reason = ""
            if reason:
                handoff = handoff.given_up(reason)
                size = handoff.held_bytes
            self._unwritten += 1
            self._waiting[account] += size
            self._queue.put((handoff, account))
        return reason

    def _has_room(self, size: int, account: Account) -> bool:
        """One capture may always wait, however large it is, and what takes no memory."""
        waiting = self._waiting[account]
        return not waiting or not size or waiting + size <= self._limits[account]

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was handed over is written; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(self._is_done, timeout_s) and not self._notes.left

    def _is_done(self) -> bool:
        return not self._unwritten

    def close(self, timeout_s: float) -> bool:
        """Write what can be written in time, note the rest as dropped, and end the thread.

        Returns:
            Whether everything is in the lake, as data or as dropped.
        """
        atexit.unregister(self._at_exit)
        if self._pid != os.getpid():  # a forked child has no such thread
            return True
        started = time.monotonic()
        with self._changed:
            done = self._changed.wait_for(self._is_done, timeout_s)
            self.closing_s = time.monotonic() - started
            self._hurried, self._closing = not done, True
            self._queue.put(None)
            if not done:
                done = self._changed.wait_for(self._is_done, _GRACE_S)
        self._thread.join(_GRACE_S if done else 0.0)
        if self._thread.is_alive():
            atexit.register(leave_alone, self._thread)
        return done and not self._notes.left

    def _at_exit(self) -> None:
        if not self.close(self._close_s):
            left = self._unwritten + self._notes.left
            sys.stderr.write(
                f"trajreplay: {left} captures were not written to {self._lake} within "
                f"{self.closing_s:.0f} s, nor could that be noted there\n"
            )
        leave_alone(self._thread)

    def _run(self) -> None:
        try:
            while (given := self._next()) is not None:
                size, account = given[0].held_bytes, given[1]
                self._take(given[0])
                del given  # it is not held while the next one is waited for
                with self._changed:
                    self._unwritten -= 1
                    self._waiting[account] -= size
                    self._changed.notify_all()
            self._notes.retry()
        finally:
            self._ended = True

    def _next(self) -> tuple[Handoff, Account] | None:
        self._make_ready()
        return self._queue.get()

    def _take(self, handoff: Handoff) -> None:
        if self._hurried:
            handoff = handoff.given_up("the program ended before it was written")
        self._notes.retry()
        try:
            self._commit(handoff)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._failed(handoff, error)

    def _commit(self, handoff: Handoff) -> None:
        self._write(handoff)
        self._written()

    def _write(self, handoff: Handoff) -> None:
        from trajreplay.schema.lakefile import open_lake
        from trajreplay.writer import CaptureBuilder
        from trajreplay.writer.events import Event

        store = open_lake(self._lake)
        if handoff.events:
            rows = [
                Event(name, dump_detail(name, resolved(fields())), time_us=time_us)
                for name, time_us, fields in handoff.events
            ]
            commit_beside(store, rows, handoff.identity)
            return
        with CaptureBuilder(store, **handoff.identity) as capture:
            if handoff.pending is None:
                capture.drop(handoff.reason)
            else:
                handoff.pending.write(capture)
                note_fates(store, capture.key, handoff)
        handoff.release()

    def _failed(self, handoff: Handoff, error: Exception) -> None:
        """Say so once for each kind of error, and note in the lake what is not there."""
        reason = reason_of(error)
        self.warn(kind_of(error), f"a capture was not written: {error}")
        self._notes.add(handoff.given_up(reason))
        self._notes.retry()
        self.keep(error)

    def keep(self, error: Exception) -> None:
        """Keep an error where that is asked for, without its frames, which hold the capture."""
        if self._strict:
            error.__cause__ = error.__context__ = None
            self.errors.append(error.with_traceback(None))

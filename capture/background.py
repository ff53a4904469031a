"""The thread that writes captures: one a process, nice, bounded by bytes, never in the way."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from trajreplay.capture.heartbeat import Noted, resolved
from trajreplay.capture.notes import Notes
from trajreplay.capture.reasons import kind_of, reason_of
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.events import dump_detail

if TYPE_CHECKING:
    from trajreplay.capture.pending import Pending
    from trajreplay.schema.identity import CaptureKey
    from trajreplay.schema.store import Store
    from trajreplay.writer.events import Event

Account = Literal["queue", "ring"]
THREAD = "trajreplay-writer"
_NICE = 19
_MOST_KINDS = 30  # of problems that are warned of
_GRACE_S = 1.0  # for the entries that say what was dropped, once the time to write it is over


class CaptureWarning(UserWarning):
    """Something of a training could not be captured; the training itself goes on."""


@dataclass(slots=True, eq=False)
class Handoff:
    """A capture on its way to the lake.

    Args:
        identity: Arguments of `Lake.capture`.
        pending: What was recorded; None once it is given up.
        reason: Why it is given up.
        sources: Rollouts that its samples come from, where it is a step and they may be held.
        events: Instead of a capture of samples, events; identity then has arguments of
            `commit_events`.
    """

    identity: Mapping[str, Any]
    pending: Pending | None
    reason: str = ""
    sources: Sequence[int] = ()
    events: Sequence[Noted] = ()

    @property
    def held_bytes(self) -> int:
        """Memory that waits to be written."""
        return 0 if self.pending is None else self.pending.held_bytes

    def given_up(self, reason: str) -> Handoff:
        """The same capture without its data, to be noted in the lake."""
        if self.pending is None:  # given up before, for a reason of its own, or events
            return self
        self.release()
        return replace(self, pending=None, reason=reason)

    def release(self) -> None:
        """Let go of its memory; nothing of it is written any more."""
        if self.pending is not None:
            self.pending.copier.release()


class Background:
    """Writes what is handed over, in order.

    Args:
        lake: The lake.
        queue_bytes: Most that may wait.
        wait_s: How long `put` may wait for room.
        close_s: How long the end of the program may wait.
        ring_bytes: Most that may wait of what the ring held.
        strict: Whether to keep what goes wrong for who calls.
        written: Is called whenever a capture was committed.

    Attributes:
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
        written: Callable[[], None] = lambda: None,
    ) -> None:
        self._lake, self._strict, self._written = lake, strict, written
        self._close_s = close_s
        self._wait_s = wait_s
        self._limits: dict[Account, int] = {"queue": queue_bytes, "ring": ring_bytes}
        self._waiting: dict[Account, int] = {"queue": 0, "ring": 0}
        # To put something there wakes the thread for less than a condition takes.
        self._queue: SimpleQueue[tuple[Handoff, Account] | None] = SimpleQueue()
        self._unwritten = 0
        self._notes = Notes(self._commit)
        self._closing = self._hurried = False
        self._changed = threading.Condition()
        self._warned: set[str] = set()
        self._pid = os.getpid()
        self.errors: list[Exception] = []
        self.closing_s = 0.0
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()
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
            if self._closing or not self._thread.is_alive():
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
        make_nice()
        while (given := self._queue.get()) is not None:
            size, account = given[0].held_bytes, given[1]
            self._take(given[0])
            del given  # it is not held while the next one is waited for
            with self._changed:
                self._unwritten -= 1
                self._waiting[account] -= size
                self._changed.notify_all()
        self._notes.retry()

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
            _commit_beside(store, rows, handoff.identity)
            return
        with CaptureBuilder(store, **handoff.identity) as capture:
            if handoff.pending is None:
                capture.drop(handoff.reason)
            else:
                handoff.pending.write(capture)
                _note_fates(store, capture.key, handoff)
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

    def warn(self, kind: str, message: str) -> None:
        """Warn, once for each kind, and of no more kinds than a person reads."""
        if kind in self._warned or len(self._warned) > _MOST_KINDS:
            return
        self._warned.add(kind)
        last = len(self._warned) > _MOST_KINDS
        warn(f"{message}; further problems are not told" if last else message)


def _commit_beside(store: Store, events: Sequence[Event], identity: Mapping[str, Any]) -> None:
    """Commit events under their name, or the next one that is free.

    They are named after the first of several steps, which a step that is tried again, or another
    recorder of this attempt, may have named before.
    """
    from trajreplay.schema.layout import entry_path
    from trajreplay.writer.events import commit_events

    key: CaptureKey = identity["key"]
    given = {name: one for name, one in identity.items() if name != "key"}
    while True:
        try:
            commit_events(store, key, events, **given)
            return
        except CaptureError:
            if key.step_id is None or not store.exists(entry_path(key)):
                raise
        key = key._replace(step_id=key.step_id + 1)


def _note_fates(store: Store, key: CaptureKey, handoff: Handoff) -> None:
    """Commit the ledger of a rollout, before the rollout itself."""
    from trajreplay.writer.events import Event, commit_events

    assert handoff.pending is not None
    events = [
        Event(fate, sample_id=sample_id, reason=reason, time_us=time_us)
        for fate, sample_id, reason, time_us in handoff.pending.ledger
    ]
    if events:
        commit_events(
            store,
            key._replace(kind="events"),
            events,
            expected_ranks=handoff.identity["expected_ranks"],
            producer=handoff.identity["producer"],
        )


def make_nice() -> None:
    """Have this thread run when no other wants to."""
    with contextlib.suppress(OSError, AttributeError):  # where threads have no priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def leave_alone(thread: threading.Thread) -> None:
    """Have the process end without the destructors of native libraries, if a thread works on.

    They run once the interpreter has ended, and take from a thread that is in native code what it
    uses, which ends the process with an abort. With glibc the process leaves before them, with
    the status that it has; elsewhere nothing is changed.
    """
    if thread.is_alive():
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.on_exit(libc._exit, None)  # what is registered last is called first


def warn(message: str) -> None:
    """Warn; where warnings are errors, nothing is raised either."""
    with contextlib.suppress(CaptureWarning):
        warnings.warn(f"trajreplay: {message}", CaptureWarning, stacklevel=4)

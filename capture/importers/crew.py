"""Processes that read and write sources of an import beside it: the interpreter runs one thread."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from trajreplay.capture.importers.registry import BUILT_IN, Importer, ImportOptions, importer_of
from trajreplay.capture.importers.wire import receive, send, unpacked
from trajreplay.capture.importers.writing import Written
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.store import Store

WORTH_S = 1.5  # of reading ahead: a process takes half of that to start
_SEEN = 2  # sources by which that is told, after the first, which loads what all of them need
_MOST = 8
_BATCHES = 2  # of a worker: the next one while it is at the first
_END_S = 5.0


@dataclasses.dataclass
class Batch:
    """Sources that are read and written together.

    Args:
        paths: The sources.
        written: What was written, in order, of as many of them as it has.
        begun: How many a worker has begun to read.
        done: Whether nothing more is to come; what is missing is left to the import.
        killed: The signal that ended the worker that had it.
    """

    paths: Sequence[Path]
    written: deque[Written] = dataclasses.field(default_factory=deque)
    begun: int = 0
    done: bool = False
    killed: int = 0


class _Worker:
    """One process, with the batches that it has."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.batches: deque[Batch] = deque()
        self.is_ready = False

    @property
    def is_free(self) -> bool:
        """Whether it takes another batch."""
        return self.is_ready and len(self.batches) < _BATCHES


class Crew:
    """Workers of one import, of which each takes a batch after the other.

    What they cannot do is left to the import: it goes on where one is ended, or none is started.

    Args:
        store: The lake.
        importer: The kind.
        options: What is said beside the files.
        sources: How many there are.
        begun: Called on each that is begun.
    """

    def __init__(
        self,
        store: Store,
        importer: Importer,
        options: ImportOptions,
        sources: int,
        begun: Callable[[], None],
    ) -> None:
        self._given = store, importer, options
        self._left, self._on_begun = sources, begun
        self._answers: queue.SimpleQueue[tuple[_Worker, tuple[Any, bytes] | None]]
        self._answers = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._threads: list[threading.Thread] = []
        self._times: list[float] = []

    def begun(self) -> None:
        """Hear that the import itself begins to read a source, and start workers if it is worth it.

        They are started once, by how long the sources before took.
        """
        self._on_begun()
        self._left -= 1
        if len(self._times) > 1 + _SEEN:
            return
        self._times.append(time.perf_counter())
        if len(self._times) > 1 + _SEEN:
            taken = (self._times[-1] - self._times[1]) / _SEEN
            if taken * self._left > WORTH_S:
                self.start()

    def start(self) -> None:
        """Start a worker for each core but one."""
        setup = _setup(*self._given)
        for _ in range(min(_cores() - 1, _MOST) if setup is not None else 0):
            self._start(setup)

    def _start(self, setup: Any) -> None:
        with contextlib.suppress(OSError):
            worker = _Worker(*_command())
            self._workers.append(worker)
            thread = threading.Thread(target=self._listen, args=(worker,), daemon=True)
            self._threads.append(thread)
            thread.start()
            self._tell(worker, setup)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers; what they wrote is with their batches."""
        for worker in self._workers:
            worker.process.terminate()
        for worker, thread in zip(self._workers, self._threads, strict=True):
            try:
                worker.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            thread.join()
            with contextlib.suppress(OSError):
                worker.process.stdin.close()  # type: ignore[union-attr]
            worker.process.stdout.close()  # type: ignore[union-attr]
        self.listen()

    @property
    def is_free(self) -> bool:
        """Whether a worker takes another batch."""
        return any(worker.is_free for worker in self._workers)

    def give(self, batch: Batch) -> None:
        """Hand a batch to the worker that has the fewest."""
        free = [worker for worker in self._workers if worker.is_free]
        worker = min(free, key=lambda one: len(one.batches))
        worker.batches.append(batch)
        self._tell(worker, {"paths": [os.fspath(one) for one in batch.paths]})

    def listen(self, *, wait: bool = False) -> None:
        """Take what workers have done, after waiting for something if asked to."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._take(*self._answers.get(block=wait))
                wait = False

    def _take(self, worker: _Worker, answer: tuple[Any, bytes] | None) -> None:
        if answer is None:
            self._ended(worker)
            return
        message, content = answer
        if message["is"] == "ready":
            worker.is_ready = True
        elif message["is"] == "begun":
            worker.batches[0].begun += 1
            self._left -= 1
            self._on_begun()
        elif message["is"] == "written":
            worker.batches[0].written.append(unpacked(message, content))
        else:
            worker.batches.popleft().done = True

    def _ended(self, worker: _Worker) -> None:
        """Leave what a worker has not done to the import; the first is what it was at."""
        worker.is_ready = False
        ended = worker.process.wait()
        for place, batch in enumerate(worker.batches):
            batch.killed = -ended if not place and ended < 0 else 0
            batch.done = True
        worker.batches.clear()

    def _tell(self, worker: _Worker, message: Any) -> None:
        with contextlib.suppress(OSError):  # one that has ended says so
            send(worker.process.stdin, message)  # type: ignore[arg-type]

    def _listen(self, worker: _Worker) -> None:
        answer: tuple[Any, bytes] | None = (None, b"")
        while answer is not None:
            try:
                answer = receive(worker.process.stdout)  # type: ignore[arg-type]
            except (OSError, ValueError):
                answer = None
            self._answers.put((worker, answer))


def _setup(store: Store, importer: Importer, options: ImportOptions) -> Any:
    """What a worker has to know; None where it could not do as the import does."""
    if type(store) is not LocalStore or importer.kind not in BUILT_IN:
        return None
    if not sys.executable or hasattr(sys, "frozen"):  # a program that is no Python
        return None
    if importer is not importer_of(importer.kind):
        return None
    said = vars(options)
    try:
        same = json.loads(json.dumps(said)) == said
    except (TypeError, ValueError):
        return None
    return {"lake": str(store.folder), "kind": importer.kind, "options": said} if same else None


def _command() -> tuple[list[str], dict[str, str]]:
    """How a worker is started, with the packages that this process has."""
    found = [one for one in sys.path if one]
    path = {"PYTHONPATH": os.pathsep.join(found), "OMP_NUM_THREADS": "1"}
    module = "trajreplay.capture.importers.worker"
    return [sys.executable, "-P", "-m", module], {**os.environ, **path}


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def named_signal(number: int) -> str:
    """A signal in a message."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

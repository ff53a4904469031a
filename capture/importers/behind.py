"""The thread of an import that commits sources while others are read."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from trajreplay.capture.importers.committing import Committing
from trajreplay.capture.importers.source import Source
from trajreplay.schema.store import Store

_AHEAD = 2  # sources that are read and not yet written


class CommittingBehind:
    """Commits sources by a thread, so that others are read meanwhile.

    All that were added are committed when the block is left; on an error in it, or one that is no
    fault of a source, those whose data is not in place leave nothing.

    Args:
        store: The lake.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._committing = Committing(store)
        self._thread = ThreadPoolExecutor(1, "trajreplay-import")
        self._added: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        done = False
        try:
            if kind is None:
                while self._added:
                    self._added.popleft().result()
                self._thread.submit(self._committing.flush).result()
                done = True
        finally:
            self._thread.shutdown(cancel_futures=True)
            if not done:
                self._committing.abandon()

    def add(self, source: Source) -> None:
        """Hand a source over; waits while too many are read and not yet written.

        While the thread is behind, captures are laid out here: the two share the work.
        """
        while self._added and self._added[0].done():
            self._added.popleft().result()
        if len(self._added) == _AHEAD:
            source.laid_out(self._store)
        self._added.append(self._thread.submit(self._committing.add, source))
        if len(self._added) > _AHEAD:
            self._added.popleft().result()

"""Written sources of an import made visible, in their order, by a thread of their own."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from trajreplay.capture.importers.report import IMPORTED, PARTIAL
from trajreplay.capture.importers.writing import EntryFile, Written, WrittenSource
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.entry_codec import load_entry, same_content
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.layout import entry_path
from trajreplay.schema.publish import remove_if_there
from trajreplay.schema.store import Store

_AGAIN = "Import it again once the lake can be written: what is there stays, and the rest is added."
_AHEAD = 3  # that wait while others are written: to be durable, a file waits for the disk


class Publishing:
    """Makes written sources visible while others are read.

    Entries are published rank by rank: until the last rank, every rollout and step of several is
    incomplete, so that an import that was killed meanwhile is no pass. Every entry is of a whole
    capture, and an import that is done again adds those that are missing.

    All that were added are visible when the block is left; on an error in it, or one that is no
    fault of a source, those whose data is not in place leave nothing.

    Args:
        store: The lake.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "trajreplay-import")
        self._added: deque[tuple[Written, Future[None]]] = deque()
        self._is_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._thread.shutdown(cancel_futures=True)
            for written, future in self._added:
                if future.cancelled():
                    discard(self._store, written)

    def add(self, written: Written) -> None:
        """Hand sources over; waits while too many are written and not yet visible."""
        self._added.append((written, self._thread.submit(self._publish, written)))
        while self._added and (len(self._added) > _AHEAD or self._added[0][1].done()):
            self._next()

    def wait(self) -> None:
        """Wait until all that were added are visible."""
        while self._added:
            self._next()

    def _publish(self, written: Written) -> None:
        """Make sources visible, unless what came before them has ended the import."""
        if self._is_ended:
            discard(self._store, written)
            return
        try:
            publish(self._store, written)
        except BaseException:
            self._is_ended = True
            raise

    def _next(self) -> None:
        self._added[0][1].result()
        self._added.popleft()


def discard(store: Store, written: Written, kept: Collection[str] = ()) -> None:
    """Remove the files of sources, in place or not, as far as they can be.

    One that cannot be removed stays: nothing reads a file that no entry names.

    Args:
        store: The lake.
        written: The sources.
        kept: Places in the lake of those that stay, since an entry names them.
    """
    for temporary, path in written.files:
        if path not in kept:
            with contextlib.suppress(OSError):
                remove_if_there(temporary)
            with contextlib.suppress(OSError, TrajReplayError):
                store.remove(path)


def publish(store: Store, written: Written) -> None:
    """Make sources visible, one after the other; all of their data is in place before."""
    named: set[str] = set()
    try:
        for temporary, path in written.files:
            store.place(temporary, path)
        for one in written.sources:
            if one.entries:
                _publish(store, one, named)
    except (TrajReplayError, OSError) as error:  # of a file: an entry tells its own
        for one in written.sources:
            if one.entries:
                one.source.fail(error, store)
    finally:
        discard(store, written, named)


def _publish(store: Store, one: WrittenSource, named: set[str]) -> None:
    """Make one source visible.

    Args:
        store: The lake.
        one: The source.
        named: Files that a visible entry names; those of its entries are added.
    """
    source, there = one.source, set(one.known)
    try:
        for entry in one.entries:
            try:
                created = _created(store, entry)
            except BaseException:
                # A reply may be lost once the name was given: the files go on a clear no only.
                held = _holds(store, entry)
                named.update(entry.paths if held is not False else ())
                there.update({entry.key} if held else ())
                raise
            named.update(entry.paths if created else ())
            there.add(entry.key)
    except (TrajReplayError, OSError) as error:
        source.fail(error, store)
        if there:
            source.result.status, source.result.hint = PARTIAL, _AGAIN
            source.tell(there)
    else:
        source.result.status = IMPORTED
        source.tell()


def _created(store: Store, entry: EntryFile) -> bool:
    """Publish an entry; whether no other program had published an equal one."""
    path = entry_path(entry.key)
    if store.publish_if_absent(path, entry.content):
        return True
    held = load_entry(store.read(path, MAX_BYTES), path)
    if not same_content(held, load_entry(entry.content, path)):
        raise CaptureError(
            f"{path}: {entry.key} was committed by another program meanwhile, with other content",
            hint="Import a run once, or give the second one its own --run.",
            path=path,
        )
    return False


def _holds(store: Store, entry: EntryFile) -> bool | None:
    """Whether the lake has an entry, with its files; None where it does not say."""
    path = entry_path(entry.key)
    try:
        found = load_entry(store.read(path, MAX_BYTES), path)
    except (TrajReplayError, OSError, MemoryError, RecursionError) as error:
        # What is not there is told by this cause, whatever the store.
        return False if isinstance(error.__cause__, FileNotFoundError) else None
    return tuple(one.path for one in found.files) == entry.paths

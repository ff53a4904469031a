"""Sources of an import, committed: all data of some is in place before any of it is visible."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Self

from trajreplay.capture.importers.report import IMPORTED, PARTIAL, UNCHANGED, ImportedSource
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.entry import Entry
from trajreplay.schema.entry_codec import load_entry, same_content
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.layout import entry_path
from trajreplay.schema.store import Store, now_us
from trajreplay.writer.commit import Prepared, entry_bytes, existing_entry
from trajreplay.writer.sharing import FILE_BYTES, FILE_CAPTURES, SharedFiles

_AHEAD = 2  # sources that are read and not yet written
_AGAIN = "Import it again once the lake can be written: what is there stays, and the rest is added."


@dataclass
class Source:
    """One source, read and checked whole.

    Args:
        result: What the report will say of it.
        counts: Samples and tokens of each of its captures.
        prepare: Lays its captures out, in the order in which they become visible.
    """

    result: ImportedSource
    counts: dict[CaptureKey, tuple[int, int]] = field(default_factory=dict)
    prepare: Callable[[], list[Prepared]] = list

    def tell(self, keys: Collection[CaptureKey] | None = None) -> None:
        """Say in the report which captures were taken: all of them, or those given."""
        result = self.result
        for key, (samples, tokens) in self.counts.items():
            if keys is None or key in keys:
                place = key.run_id, key.attempt, key.rollout_id, key.step_id, key.rank
                result.captures.append(place)
                result.samples += samples
                result.tokens += tokens

    def fail(self, error: TrajReplayError | OSError, store: Store) -> None:
        """Say in the report why nothing of it was taken."""
        told = not_writable(store, error) if isinstance(error, OSError) else error
        self.result.problem, self.result.hint = told.message, told.hint


def not_writable(store: Store, error: OSError) -> CaptureError:
    """What to say where a lake cannot be written."""
    return CaptureError(
        f"{store} cannot be written: {error}",
        hint="Make room, or make the folder writable, and import it again.",
    )


@dataclass
class _Waiting:
    """A source whose data is written: keys that the lake has, and where its other entries are."""

    source: Source
    known: set[CaptureKey]
    places: list[int] = field(default_factory=list)


class Committing:
    """Commits sources, some together: their captures share data files.

    What is there with other content is refused before anything of its source is visible. Entries
    are published rank by rank: until the last rank, every rollout and step of several is
    incomplete, so that an import that was killed meanwhile is no pass. Every entry is of a
    whole capture, and an import that is done again adds those that are missing.

    Args:
        store: The lake.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files = SharedFiles(store)
        self._waiting: list[_Waiting] = []
        self._keys: set[CaptureKey] = set()
        self._size = 0

    def add(self, source: Source) -> None:
        """Write the data of a source; it is visible after `flush` at the latest."""
        try:
            captures = source.prepare()
        except (TrajReplayError, OSError) as error:
            source.fail(error, self._store)
            return
        finally:
            source.prepare = list  # what it was read into is needed no more
        size = sum(one.value_bytes for one in captures)
        full = len(self._keys) + len(captures) > FILE_CAPTURES
        twice = not self._keys.isdisjoint(source.counts)
        if full or twice or self._size + size > FILE_BYTES:
            self.flush()
        try:
            there = [existing_entry(self._store, one.entry) for one in captures]
            missing = [one for one, found in zip(captures, there, strict=True) if found is None]
            for one in missing:
                entry_bytes(one.entry)
        except (TrajReplayError, OSError) as error:
            source.fail(error, self._store)
            return
        if not missing:
            source.result.status = UNCHANGED
            source.tell()
            return
        self._keys.update(source.counts)
        self._size += size
        known = set(source.counts) - {one.entry.key for one in missing}
        waiting = _Waiting(source, known)
        self._waiting.append(waiting)
        try:
            waiting.places += [self._files.add(one) for one in missing]
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Make all sources that wait visible, one after the other."""
        waiting = self._waiting
        if not waiting:
            return
        try:
            entries = self._files.place()
        except OSError as error:
            self._give_up(error)
            return
        named: set[str] = set()
        try:
            for one in waiting:
                self._publish(one, [entries[at] for at in one.places], named)
        finally:
            for path in self._files.paths:
                if path not in named:
                    self._store.remove(path)
            self._begin()

    def _publish(self, one: _Waiting, entries: list[Entry], named: set[str]) -> None:
        """Make one source visible.

        Args:
            one: The source.
            entries: Those of its captures that the lake lacked.
            named: Files that a visible entry names; those of its entries are added.
        """
        source, there = one.source, one.known
        try:
            for entry in entries:
                if self._created(entry):
                    named.update(file.path for file in entry.files)
                there.add(entry.key)
        except (TrajReplayError, OSError) as error:
            source.fail(error, self._store)
            # A reply may be lost once the name was given.
            if not isinstance(error, TrajReplayError) and self._holds(entry):
                named.update(file.path for file in entry.files)
                there.add(entry.key)
            if there:
                source.result.status, source.result.hint = PARTIAL, _AGAIN
                source.tell(there)
        else:
            source.result.status = IMPORTED
            source.tell()

    def _created(self, entry: Entry) -> bool:
        """Publish an entry; whether no other program had published an equal one."""
        entry = replace(entry, created_us=now_us())
        path = entry_path(entry.key)
        if self._store.publish_if_absent(path, entry_bytes(entry)):
            return True
        if not same_content(load_entry(self._store.read(path, MAX_BYTES), path), entry):
            raise CaptureError(
                f"{path}: {entry.key} was committed by another program meanwhile, with other "
                "content",
                hint="Import a run once, or give the second one its own --run.",
                path=path,
            )
        return False

    def _holds(self, entry: Entry) -> bool:
        """Whether the lake has an entry, with its files."""
        path = entry_path(entry.key)
        try:
            found = load_entry(self._store.read(path, MAX_BYTES), path)
        except TrajReplayError:
            return False
        return [one.path for one in found.files] == [one.path for one in entry.files]

    def _give_up(self, error: OSError) -> None:
        for one in self._waiting:
            one.source.fail(error, self._store)
        self.abandon()

    def abandon(self) -> None:
        """Leave nothing of the sources that wait."""
        self._files.abandon()
        self._begin()

    def _begin(self) -> None:
        self._files = SharedFiles(self._store)
        self._waiting, self._keys, self._size = [], set(), 0


class CommittingBehind:
    """Commits sources by a thread, so that others are read meanwhile.

    All that were added are committed when the block is left; on an error in it, or one that is no
    fault of a source, those whose data is not in place leave nothing.

    Args:
        store: The lake.
    """

    def __init__(self, store: Store) -> None:
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
        """Hand a source over; waits while too many are read and not yet written."""
        self._added.append(self._thread.submit(self._committing.add, source))
        if len(self._added) > _AHEAD:
            self._added.popleft().result()

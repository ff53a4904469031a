"""Sources of an import, committed: all data of some is in place before any of it is visible."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trajreplay.capture.importers.report import IMPORTED, PARTIAL, UNCHANGED
from trajreplay.capture.importers.source import Source
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.entry import Entry
from trajreplay.schema.entry_codec import load_entry, same_content
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.layout import entry_path
from trajreplay.schema.store import Store, now_us
from trajreplay.writer.commit import entry_bytes, existing_entry
from trajreplay.writer.sharing import FILE_BYTES, FILE_CAPTURES, SharedFiles

_AGAIN = "Import it again once the lake can be written: what is there stays, and the rest is added."


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
        """Write the data of a source; it is visible after `flush` at the latest.

        On an error that is no fault of a source, nothing is left of those that wait.
        """
        try:
            self._add(source)
        except BaseException:
            self.abandon()
            raise

    def _add(self, source: Source) -> None:
        captures = source.laid_out(self._store)
        if captures is None:
            return
        size = sum(one.value_bytes for one in captures)
        full = len(self._keys) + len(captures) > FILE_CAPTURES
        twice = not self._keys.isdisjoint(source.counts)
        if full or twice or self._size + size > FILE_BYTES:
            self.flush()
        try:
            there = [existing_entry(self._store, one.entry) for one in captures]
            missing = [one for one, found in zip(captures, there, strict=True) if found is None]
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
        except (TrajReplayError, OSError) as error:
            self._give_up(error)

    def flush(self) -> None:
        """Make all sources that wait visible, one after the other."""
        waiting = self._waiting
        if not waiting:
            return
        try:
            entries = self._files.place()
        except (TrajReplayError, OSError) as error:
            self._give_up(error)
            return
        named: set[str] = set()
        try:
            for one in waiting:
                self._publish(one, [entries[at] for at in one.places], named)
        finally:
            self._files.abandon(named)
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
            dated = [replace(entry, created_us=now_us()) for entry in entries]
            contents = [entry_bytes(entry) for entry in dated]  # one too large refuses them all
            for entry, content in zip(dated, contents, strict=True):
                files = {file.path for file in entry.files}
                try:
                    created = self._created(entry, content)
                except BaseException:
                    # A reply may be lost once the name was given: the files go on a clear no only.
                    held = self._holds(entry)
                    named.update(files if held is not False else ())
                    there.update({entry.key} if held else ())
                    raise
                named.update(files if created else ())
                there.add(entry.key)
        except (TrajReplayError, OSError) as error:
            source.fail(error, self._store)
            if there:
                source.result.status, source.result.hint = PARTIAL, _AGAIN
                source.tell(there)
        else:
            source.result.status = IMPORTED
            source.tell()

    def _created(self, entry: Entry, content: bytes) -> bool:
        """Publish an entry; whether no other program had published an equal one."""
        path = entry_path(entry.key)
        if self._store.publish_if_absent(path, content):
            return True
        if not same_content(load_entry(self._store.read(path, MAX_BYTES), path), entry):
            raise CaptureError(
                f"{path}: {entry.key} was committed by another program meanwhile, with other "
                "content",
                hint="Import a run once, or give the second one its own --run.",
                path=path,
            )
        return False

    def _holds(self, entry: Entry) -> bool | None:
        """Whether the lake has an entry, with its files; None where it does not say."""
        path = entry_path(entry.key)
        try:
            found = load_entry(self._store.read(path, MAX_BYTES), path)
        except (TrajReplayError, OSError, MemoryError, RecursionError) as error:
            # What is not there is told by this cause, whatever the store.
            return False if isinstance(error.__cause__, FileNotFoundError) else None
        return [one.path for one in found.files] == [one.path for one in entry.files]

    def _give_up(self, error: TrajReplayError | OSError) -> None:
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

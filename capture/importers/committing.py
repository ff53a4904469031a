"""Captures of one source, committed together: all data is in place before any is visible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trajreplay.capture.importers.building import EventBlock
from trajreplay.capture.importers.report import IMPORTED, UNCHANGED
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.entry import Entry
from trajreplay.schema.entry_codec import decode_all, load_entry, same_content
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.layout import entry_path
from trajreplay.schema.store import Listed, Store
from trajreplay.writer import CaptureBuilder


class HeldBack:
    """A lake whose new entries become visible when `publish` is called, one after the other.

    Args:
        store: The lake.
        strict: Whether entries are read back whole before any of them is visible: those made of
            another package's records, which may hold what no reader takes.

    Attributes:
        published: The captures that became visible.
    """

    def __init__(self, store: Store, *, strict: bool = False) -> None:
        self._store = store
        self._strict = strict
        self._expected: dict[str, CaptureKey] = {}
        self._entries: dict[str, bytes] = {}
        self._placed: dict[str, None] = {}
        self.published: set[CaptureKey] = set()

    def __str__(self) -> str:
        return str(self._store)

    @property
    def folder(self) -> Path | None:
        """The folder that it is, if it is one."""
        return self._store.folder

    def open(self, path: str) -> int:
        """As of the lake."""
        return self._store.open(path)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """As of the lake."""
        return self._store.read(path, limit_bytes)

    def exists(self, path: str) -> bool:
        """As of the lake."""
        return self._store.exists(path)

    def list(self, prefix: str) -> Iterator[Listed]:
        """As of the lake."""
        return self._store.list(prefix)

    def temporary(self) -> str:
        """As of the lake."""
        return self._store.temporary()

    def place(self, temporary: str, path: str) -> None:
        """As of the lake; the file is remembered until its entry is visible."""
        self._placed[path] = None
        self._store.place(temporary, path)

    def publish_if_absent(self, path: str, data: bytes) -> bool:
        """Hold an entry back; anything else is published at once."""
        if path not in self._expected:
            return self._store.publish_if_absent(path, data)
        if self._store.exists(path):
            return False
        if self._strict:
            decode_all(load_entry(data, path))
        self._entries[path] = data
        return True

    def remove(self, path: str) -> None:
        """As of the lake."""
        self._placed.pop(path, None)
        self._store.remove(path)

    def sweep(self, older_than_s: float) -> int:
        """As of the lake."""
        return self._store.sweep(older_than_s)

    def hold(self, keys: Sequence[CaptureKey]) -> None:
        """Hold the entries of these captures back from now on."""
        self._expected = {entry_path(key): key for key in keys}

    def publish(self) -> None:
        """Make what was held back visible.

        Raises:
            CaptureError: Another program committed one of them meanwhile, with other content; or
                the lake cannot be written, and `published` says how far it came.
        """
        for path, data in self._entries.items():
            entry = load_entry(data, path)
            try:
                created = self._store.publish_if_absent(path, data)
            except OSError as error:
                if self._store.exists(path):  # it failed once the name was given
                    self._seen(entry)
                raise CaptureError(
                    f"{self._store} cannot be written: {error}",
                    hint="Make room, or make the folder writable, and import it again.",
                ) from error
            if created:
                self._seen(entry)
            else:
                self._check_same(entry, path)

    def _seen(self, entry: Entry) -> None:
        self.published.add(entry.key)
        for file in entry.files:
            self._placed.pop(file.path, None)

    def _check_same(self, entry: Entry, path: str) -> None:
        if not same_content(load_entry(self._store.read(path, MAX_BYTES), path), entry):
            raise CaptureError(
                f"{path}: {entry.key} was committed by another program meanwhile, with other "
                "content",
                hint="Import a run once, or give the second one its own --run.",
                path=path,
            )

    def clear(self) -> None:
        """Remove the data of what did not become visible."""
        for path in list(self._placed):
            self.remove(path)


def committed(held: HeldBack, builders: Sequence[CaptureBuilder | EventBlock]) -> str:
    """Commit the captures of one source.

    What is there with other content is refused before anything is visible. Entries are published
    rank by rank: until the last rank, every rollout and step of several is incomplete, so that an
    import that was killed meanwhile is no pass, and one that is done again completes it.

    Args:
        held: The lake that the builders write to.
        builders: The captures.

    Returns:
        Whether they were imported, or all of them were there.

    Raises:
        CaptureError: One of them is there with other content, or the lake cannot be written.
    """
    there = [held.exists(entry_path(one.key)) for one in builders]
    held.hold([one.key for one in builders])
    try:
        for one in sorted(builders, key=lambda one: (one.key.rank, one.key)):
            with one:
                pass
        held.publish()
    finally:
        held.clear()
    return UNCHANGED if all(there) else IMPORTED

"""Sources of an import, written: all of their data durable, and none of it visible yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.report import UNCHANGED
from trajreplay.capture.importers.source import Source, read_source
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import TrajReplayError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.store import Store, now_us
from trajreplay.writer.commit import Prepared, entry_bytes, existing_entry
from trajreplay.writer.sharing import FILE_BYTES, FILE_CAPTURES, SharedFiles


@dataclass(frozen=True)
class EntryFile:
    """An entry as it will be published.

    Args:
        key: Its capture.
        paths: The data files that it names.
        content: The bytes of its file.
    """

    key: CaptureKey
    paths: tuple[str, ...]
    content: bytes


@dataclass
class WrittenSource:
    """A source, and what of it is to become visible.

    Args:
        source: The source.
        known: Its captures that the lake has already.
        entries: Those of the others, in the order in which they become visible.
    """

    source: Source
    known: set[CaptureKey] = field(default_factory=set)
    entries: list[EntryFile] = field(default_factory=list)


@dataclass
class Written:
    """Sources that share data files.

    Args:
        sources: All of them, also those that are refused or unchanged.
        files: Where each file is, and its place in the lake.
    """

    sources: list[WrittenSource]
    files: list[tuple[str, str]]

    @property
    def keys(self) -> set[CaptureKey]:
        """The captures of its sources."""
        return {key for one in self.sources for key in one.source.counts}


def written_sources(
    store: Store,
    importer: Importer,
    paths: Sequence[Path],
    options: ImportOptions,
    begun: Callable[[], None],
) -> Iterator[Written]:
    """Read sources and write their data, some together.

    It ends before a source that has a capture of one before it: what is in the lake is known only
    once those before are visible.

    Args:
        store: The lake.
        importer: The kind.
        paths: The sources.
        options: What is said beside them.
        begun: Called before each is read.
    """
    group, keys = _Group(store), set[CaptureKey]()
    try:
        for path in paths:
            begun()
            source, captures = read_source(store, importer, path, options)
            if not keys.isdisjoint(source.counts):
                break
            keys.update(source.counts)
            if captures and not group.fits(captures):
                yield group.finished()
                group = _Group(store)
            group.add(source, captures)
        if group.sources:
            yield group.finished()
    except BaseException:
        group.files.abandon()
        raise


class _Group:
    """Sources that are being written together."""

    def __init__(self, store: Store) -> None:
        self.sources: list[WrittenSource] = []
        self.files = SharedFiles(store)
        self._store = store
        self._places: list[list[int]] = []
        self._captures = self._size = 0

    def fits(self, captures: Sequence[Prepared]) -> bool:
        """Whether there is room for some captures beside those that are there."""
        size = sum(one.value_bytes for one in captures)
        many = self._captures + len(captures) > FILE_CAPTURES
        return not self._captures or not (many or self._size + size > FILE_BYTES)

    def add(self, source: Source, captures: list[Prepared]) -> None:
        """Write the captures of a source that the lake lacks."""
        one, places = WrittenSource(source), list[int]()
        self.sources.append(one)
        self._places.append(places)
        try:
            there = [existing_entry(self._store, each.entry) for each in captures]
        except (TrajReplayError, OSError) as error:
            source.fail(error, self._store)
            return
        missing = [each for each, found in zip(captures, there, strict=True) if found is None]
        one.known = {each.entry.key for each in captures} - {each.entry.key for each in missing}
        if not missing:
            if captures:
                source.result.status = UNCHANGED
                source.tell()
            return
        self._captures += len(missing)
        self._size += sum(each.value_bytes for each in missing)
        try:
            places += map(self.files.add, missing)
        except (TrajReplayError, OSError) as error:
            self._give_up(error)

    def finished(self) -> Written:
        """All of it, its files durable."""
        try:
            entries = self.files.finish()
        except (TrajReplayError, OSError) as error:
            self._give_up(error)
            entries = []
        for one, places in zip(self.sources, self._places, strict=True):
            try:  # one that is too large refuses them all
                one.entries = [_entry_file(entries[at]) for at in places]
            except TrajReplayError as error:
                one.source.fail(error, self._store)
        return Written(self.sources, self.files.finished)

    def _give_up(self, error: TrajReplayError | OSError) -> None:
        """Leave nothing of what was written: no one file can be told from the others."""
        self.files.abandon()
        self.files = SharedFiles(self._store)
        for one, places in zip(self.sources, self._places, strict=True):
            if places or one is self.sources[-1]:
                one.source.fail(error, self._store)
                places.clear()


def _entry_file(entry: Entry) -> EntryFile:
    dated = replace(entry, created_us=now_us())
    return EntryFile(dated.key, tuple(one.path for one in dated.files), entry_bytes(dated))

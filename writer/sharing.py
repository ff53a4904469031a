"""Data files that several captures share: row groups of one after those of the other."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

import pyarrow as pa

from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.layout import data_path, packed_path
from trajreplay.schema.publish import remove_if_there
from trajreplay.schema.store import Store
from trajreplay.schema.tables import TABLES
from trajreplay.writer.commit import Prepared, value_bytes
from trajreplay.writer.parquet import DataFileWriter

FILE_CAPTURES = 8  # in one data file: each of its readers parses a footer of all of them
FILE_BYTES = 32 << 20  # of the rows of one data file, unless a single capture has more


@dataclass
class _Open:
    """A file that is being written, and the files of entries that it will be."""

    temporary: str
    writer: DataFileWriter
    members: list[tuple[int, int]] = field(default_factory=list)
    value_bytes: int = 0


class SharedFiles:
    """Writes captures to files that those of one attempt and of the same columns share.

    Nothing names the files before they are in place and their entries published, which is left to
    the caller.

    Args:
        store: The lake.

    Attributes:
        finished: Where each file is that is durable, and its place in the lake.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: dict[object, _Open] = {}
        self._entries: list[Entry] = []
        self.finished: list[tuple[str, str]] = []

    def add(self, prepared: Prepared) -> int:
        """Write the rows of a capture.

        Returns:
            Its place among the entries that `finish` returns.

        Raises:
            OSError: The lake cannot be written.
            DatasetError: It is an object store that cannot.
        """
        at = len(self._entries)
        self._entries.append(prepared.entry)
        for index, data in enumerate(prepared.tables):
            self._write(at, index, data)
        return at

    def _write(self, at: int, index: int, data: pa.Table) -> None:
        entry = self._entries[at]
        draft = entry.files[index]
        size = value_bytes(draft)
        kind = entry.key.run_id, entry.key.attempt, draft.table, *data.column_names
        there = self._open.get(kind)
        full = there is not None and len(there.members) == FILE_CAPTURES
        if there is not None and (full or there.value_bytes + size > FILE_BYTES):
            self._close(kind)
            there = None
        if there is None:
            temporary = self._store.temporary()
            writer = DataFileWriter(temporary, TABLES[draft.table], data.schema)
            there = self._open[kind] = _Open(temporary, writer)
        there.members.append((at, index))
        there.value_bytes += size
        first = there.writer.add(data, draft.row_groups)
        self._change(at, index, replace(draft, first_row_group=first))

    def _change(self, at: int, index: int, file: DataFile) -> None:
        files = list(self._entries[at].files)
        files[index] = file
        self._entries[at] = replace(self._entries[at], files=tuple(files))

    def _close(self, kind: object) -> None:
        """Make a file durable, and tell its captures where it will be."""
        one = self._open[kind]
        at, index = one.members[0]
        key, table = self._entries[at].key, self._entries[at].files[index].table
        alone = len(one.members) == 1
        path = data_path(key, table) if alone else packed_path(key.run_id, key.attempt, table)
        size, footer, digest = one.writer.close()
        self.finished.append((one.temporary, path))
        del self._open[kind]
        for at, index in one.members:
            draft = self._entries[at].files[index]
            placed = replace(draft, path=path, bytes=size, footer=footer, digest=digest)
            self._change(at, index, placed)

    def finish(self) -> list[Entry]:
        """Make all files durable.

        Returns:
            The entries to publish once the files are in place, in the order of `add`.

        Raises:
            OSError: The lake cannot be written.
        """
        for kind in list(self._open):
            self._close(kind)
        return self._entries

    def abandon(self) -> None:
        """Remove the files, as far as they can be."""
        for one in self._open.values():
            one.writer.abandon()
            self.finished.append((one.temporary, ""))
        self._open.clear()
        for temporary, _ in self.finished:
            with contextlib.suppress(OSError):
                remove_if_there(temporary)
        self.finished.clear()

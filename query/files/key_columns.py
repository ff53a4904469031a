"""Key columns as the manifest has them: what a file holds in them is held against these."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import pyarrow as pa

from trajreplay.query.files.datafile import OpenFile
from trajreplay.schema.columns import Column
from trajreplay.schema.digest import column_digest
from trajreplay.schema.entry import DataFile
from trajreplay.schema.identity import CaptureKey

_KNOWN_PAGES = 1024
_KNOWN_BYTES = 1 << 14
KEY_NAMES = frozenset({*CaptureKey._fields, "row"})


def key_column(
    column: Column, key: CaptureKey, start: int, rows: int
) -> tuple[pa.ChunkedArray, str]:
    """A key column of a capture in its declared type, and its digest.

    Args:
        column: Its declaration.
        key: The capture.
        start: Row of the capture that the first one is.
        rows: How many rows.
    """
    value = start if column.name == "row" else getattr(key, column.name)
    return _kept(column.name, str(column.type), value, rows)


@lru_cache(maxsize=1024)
def _kept(name: str, type_name: str, value: Any, rows: int) -> tuple[pa.ChunkedArray, str]:
    """What captures of one shape share: most key columns of the next capture are the same."""
    if name == "row":
        values = pa.array(range(value, value + rows), type_name)
    else:
        values = pa.repeat(pa.scalar(value, type_name), rows)
    return pa.chunked_array([values]), column_digest(values)


class KnownKeys:
    """What is known of the files of a lake: those that are whole, and pages of key columns.

    A file that captures share is read and digested once. Nearly all key columns of a lake are one
    value over and over, and their pages the same bytes. Equal bytes of equal type and number decode
    to equal values: they are not decoded again.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], None] = {}
        self._whole: set[tuple[str, str]] = set()

    def is_whole(self, file: DataFile) -> bool:
        """Whether every byte of a file was verified before."""
        return (file.path, file.digest) in self._whole

    def add_whole(self, file: DataFile) -> None:
        """Every byte of a file was verified."""
        self._whole.add((file.path, file.digest))

    def of(self, opened: OpenFile, key: CaptureKey) -> list[str]:
        """The key columns of a file that are known to hold the key of its capture."""
        return [
            name
            for name in opened.footer.names
            if name in KEY_NAMES and self._pages(opened, key, name) in self._known
        ]

    def add(self, opened: OpenFile, key: CaptureKey, names: Iterable[str]) -> None:
        """Key columns of a file that were decoded and hold the key of its capture."""
        for name in names:
            if name in KEY_NAMES and (pages := self._pages(opened, key, name)) is not None:
                if len(self._known) >= _KNOWN_PAGES:
                    self._known.pop(next(iter(self._known)))
                self._known[pages] = None

    @staticmethod
    def _pages(opened: OpenFile, key: CaptureKey, name: str) -> tuple[Any, ...] | None:
        """All that a key column is made of, and what it should hold; None of a large one."""
        file, chunks = opened.file, opened.footer.chunks(name)
        if opened.whole is None or not opened.footer.as_declared or len(chunks) != 1:
            return None
        chunk, rows = chunks[0], file.row_groups[0]
        data, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
        start = data if dictionary is None else dictionary
        size = chunk.total_compressed_size
        if (
            (file.first_row, file.rows) != (0, rows)
            or not 0 < size <= _KNOWN_BYTES
            or not 0 <= start <= data <= len(opened.whole) - size
        ):
            return None
        pages = opened.whole[start : start + size]
        form = chunk.physical_type, chunk.compression, chunk.num_values, data - start
        return name, getattr(key, name, 0), rows, *form, pages


def key_values(key: CaptureKey, name: str, rows: int, start: int = 0) -> pa.Array:
    """A key column in the type of its Python values."""
    if name == "row":
        return pa.array(range(start, start + rows), pa.int32())
    value = getattr(key, name)
    return pa.nulls(rows) if value is None else pa.repeat(pa.scalar(value), rows)

"""Data files: opened only if their size, bytes and footer are what the entry says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.query.files.footers import Footer, broken, check_chunks
from trajreplay.query.files.page_headers import check_claims
from trajreplay.schema.columns import Table
from trajreplay.schema.entry import DataFile
from trajreplay.schema.filedigest import bytes_digest, file_digest, footer_bytes, footer_digest
from trajreplay.schema.store import Store

_NO_FOOTER = "does not end in the footer of a Parquet file of at most 16 MiB"
WHOLE_LIMIT_BYTES = 64 << 20
_FEW_BYTES = 1 << 12
_SMALL_BYTES = 128 << 10  # costs less to read and verify than to look into


class OpenFile:
    """A data file, open for some of its columns; a context manager.

    Opening checks the file's size, footer, schema and row groups; what a column claims to hold is
    checked before it is read, so that no value takes memory before.

    Args:
        store: The lake.
        file: The file, as the entry has it.
        table: The table of its rows.
        columns: The columns to read; all that the entry names if omitted.
        every_byte: Whether all bytes are verified, also those that are not read.

    Attributes:
        whole: All bytes of the file, their digest verified; None where only little of it, or too
            much, is asked for.
        footer: What its footer says.

    Raises:
        DatasetError: The file is not what the entry says.
    """

    def __init__(
        self,
        store: Store,
        file: DataFile,
        table: Table,
        columns: Sequence[str] | None = None,
        *,
        every_byte: bool = False,
    ) -> None:
        self.file = file
        self.table = table
        self.columns = tuple(file.columns) if columns is None else tuple(columns)
        self._descriptor = store.open(file.path)
        self.whole: bytes | None = None
        try:
            self._check_size()
            if self._wants_whole(every_byte):
                self.whole = self._verified_bytes()
            else:
                self._check_footer()
                if every_byte and file.digest:
                    self._check_digest(file_digest(self._descriptor))
            texts = tuple([one for one in self.columns if one in table.texts])
            self.parquet = self._open(texts)
            self.footer = Footer(file, self.parquet, texts)
            self._check_chunks()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    @property
    def row_groups(self) -> range:
        """The row groups that hold rows of the capture."""
        first = self.file.first_row_group
        return range(first, first + len(self.file.row_groups))

    def read(self, groups: range, columns: Sequence[str] | None = None) -> pa.Table:
        """Decode columns of some row groups; text stays in dictionaries.

        Args:
            groups: The row groups, of those of the capture.
            columns: Some of the columns that the file was opened for; all of them if omitted.

        Raises:
            DatasetError: The file is damaged, or a column claims other values than its entry, or
                more memory than they may take.
        """
        names = list(self.columns if columns is None else columns)
        self.check_columns(names, groups)
        try:
            return self.parquet.read_row_groups(list(groups), columns=names, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise broken(self.file, f"cannot be decoded: {error}") from error

    def check_columns(self, names: Iterable[str], groups: range | None = None) -> None:
        """Hold what columns claim to decode to against the entry, and against their values.

        Raises:
            DatasetError: One claims other values than its entry, or more memory than they may take.
        """
        footer, file, texts = self.footer, self.file, self.table.texts
        content = self._read_at if self.whole is None else self.whole
        for name in names:
            footer.check_count(name)
            chunks = footer.chunks(name) if groups is None else footer.chunks_in(name, groups)
            try:
                check_claims(content, file.bytes, chunks, name in texts)
            except ValueError as error:
                raise broken(file, f"column {name} has {error}", name) from error

    def _read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def _check_size(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if size != self.file.bytes:
            raise broken(self.file, f"has {size} bytes, expected {self.file.bytes}")

    def _check_footer(self) -> None:
        found = footer_digest(self._descriptor, self.file.bytes)
        if not found:
            raise broken(self.file, _NO_FOOTER)
        if found != self.file.footer:
            raise broken(
                self.file,
                f"ends in a footer with the digest {found}, expected {self.file.footer}: it is not "
                "the one that was written",
            )

    def _wants_whole(self, every_byte: bool) -> bool:
        """Whether the file is so small, or so much of it asked for, that it is read at once."""
        if not self.file.digest or self.file.bytes > WHOLE_LIMIT_BYTES:
            return False
        if every_byte or self.file.bytes <= _SMALL_BYTES:
            return True
        return 2 * sum([4 * self.file.columns[name].values for name in self.columns]) >= (
            self.file.bytes
        )

    def _verified_bytes(self) -> bytes:
        content = os.pread(self._descriptor, self.file.bytes, 0)
        self._check_digest(bytes_digest(content))
        if not footer_bytes(content[-8:], self.file.bytes):
            raise broken(self.file, _NO_FOOTER)
        return content

    def _check_digest(self, found: str) -> None:
        if found != self.file.digest:
            raise broken(
                self.file, f"has the digest {found}, expected {self.file.digest}: its bytes changed"
            )

    def _source(self) -> Any:
        if self.whole is not None:
            return pa.BufferReader(self.whole)
        content = os.fdopen(self._descriptor, "rb", buffering=0, closefd=False)
        return pa.PythonFile(content, mode="r")

    def _check_chunks(self) -> None:
        parquet = self.parquet
        if self.whole is None:  # with a buffer, since each column is else read as it is opened
            known, size = parquet.metadata, _FEW_BYTES
            parquet = pq.ParquetFile(self._source(), metadata=known, buffer_size=size)
        try:
            check_chunks(parquet, self.row_groups)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise broken(self.file, f"has a footer that cannot be read: {error}") from error

    def _open(self, as_dictionaries: tuple[str, ...]) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(
                self._source(), read_dictionary=list(as_dictionaries) or None, pre_buffer=False
            )
        except KeyError as error:
            raise broken(self.file, f"lacks the column {error}, which its entry lists") from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise broken(self.file, f"has a footer that cannot be read: {error}") from error

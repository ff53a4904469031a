"""Data files: opened only if their size, footer, schema and counts are what the entry says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.query.page_headers import check_claims
from trajreplay.schema.columns import Table
from trajreplay.schema.digest import canonical_type
from trajreplay.schema.entry import DataFile
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.filedigest import bytes_digest, footer_bytes, footer_digest
from trajreplay.schema.store import Store
from trajreplay.schema.tables import TABLES

_TRUST_HINT = "Restore the file from a copy of the lake. What else is affected: trajreplay validate"
_NO_FOOTER = "does not end in the footer of a Parquet file of at most 16 MiB"
_WHOLE_LIMIT_BYTES = 64 << 20
_SMALL_BYTES = 128 << 10  # costs less to read and verify than to look into
_TEXT = pa.dictionary(pa.int32(), pa.string())


class OpenFile:
    """A data file, open for some of its columns; a context manager.

    Opening checks the file's size, footer and schema, and for these columns the counts, before
    any value takes memory.

    Args:
        store: The lake.
        file: The file, as the entry has it.
        table: The table of its rows.
        columns: The columns to read; all that the entry names if omitted.

    Attributes:
        whole: All bytes of the file, their digest verified; None where only little of it, or too
            much, is asked for.

    Raises:
        DatasetError: The file is not what the entry says.
    """

    def __init__(
        self,
        store: Store,
        file: DataFile,
        table: Table,
        columns: Sequence[str] | None = None,
    ) -> None:
        self.file = file
        self.table = table
        self.columns = tuple(file.columns) if columns is None else tuple(columns)
        self._content = os.fdopen(store.open(file.path), "rb", buffering=0)
        self.whole: bytes | None = None
        try:
            self._check_size()
            if self._wants_whole():
                self.whole = self._verified_bytes()
            else:
                self._check_footer()
            self.parquet = self._open()
            self._names = self._checked_names()
            self._check_counts()
        except BaseException:
            self._content.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._content.close()

    @property
    def row_groups(self) -> range:
        """The row groups that hold rows of the capture."""
        first = self.file.first_row_group
        return range(first, first + len(self.file.row_groups))

    def chunk(self, group: int, name: str) -> pq.ColumnChunkMetaData:
        """The metadata of a column of one leaf in a row group."""
        leaf = _leaves_of(self.table.name, self._names)[name].start
        return self.parquet.metadata.row_group(group).column(leaf)

    def read(self, groups: Iterable[int], columns: Sequence[str] | None = None) -> pa.Table:
        """Decode columns of some row groups; text stays in dictionaries.

        Args:
            groups: The row groups.
            columns: Some of the columns that the file was opened for; all of them if omitted.

        Raises:
            DatasetError: The file is damaged, or its pages claim more memory than they may.
        """
        names = list(self.columns if columns is None else columns)
        wanted = list(groups)
        for name in names:
            self._check_pages(wanted, name)
        try:
            return self.parquet.read_row_groups(wanted, columns=names, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise broken(self.file, f"cannot be decoded: {error}") from error

    def _check_pages(self, groups: Sequence[int], name: str) -> None:
        leaves = _leaves_of(self.table.name, self._names)[name]
        parts = [self.parquet.metadata.row_group(group) for group in groups]
        chunks = [part.column(leaf) for part in parts for leaf in leaves]
        try:
            check_claims(self._read_at, self.file.bytes, chunks, self.table[name].is_text)
        except ValueError as error:
            raise broken(self.file, f"column {name} has {error}", name) from error

    def _read_at(self, offset: int, size: int) -> bytes:
        if self.whole is not None:
            return self.whole[offset : offset + size]
        return os.pread(self._content.fileno(), size, offset)

    def _check_size(self) -> None:
        size = os.fstat(self._content.fileno()).st_size
        if size != self.file.bytes:
            raise broken(self.file, f"has {size} bytes, expected {self.file.bytes}")

    def _check_footer(self) -> None:
        found = footer_digest(self._content.fileno(), self.file.bytes)
        if not found:
            raise broken(self.file, _NO_FOOTER)
        if found != self.file.footer:
            raise broken(
                self.file,
                f"ends in a footer with the digest {found}, expected {self.file.footer}: it is not "
                "the one that was written",
            )

    def _wants_whole(self) -> bool:
        """Whether the file is so small, or so much of it asked for, that it is read at once."""
        sealed = self.file.digest and self.file.bytes <= _WHOLE_LIMIT_BYTES
        wanted = sum(4 * self.file.columns[name].values for name in self.columns)
        small = self.file.bytes <= _SMALL_BYTES
        return bool(sealed) and (small or 2 * wanted >= self.file.bytes)

    def _verified_bytes(self) -> bytes:
        content = os.pread(self._content.fileno(), self.file.bytes, 0)
        found = bytes_digest(content)
        if found != self.file.digest:
            raise broken(
                self.file, f"has the digest {found}, expected {self.file.digest}: its bytes changed"
            )
        if not footer_bytes(content[-8:], self.file.bytes):
            raise broken(self.file, _NO_FOOTER)
        return content

    def _open(self) -> pq.ParquetFile:
        texts = [one for one in self.columns if one in self.table and self.table[one].is_text]
        source: Any = pa.PythonFile(self._content, mode="r")
        if self.whole is not None:
            source = pa.BufferReader(self.whole)
        try:
            return pq.ParquetFile(source, read_dictionary=texts or None, pre_buffer=False)
        except KeyError as error:
            raise broken(self.file, f"lacks the column {error}, which its entry lists") from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise broken(self.file, f"has a footer that cannot be read: {error}") from error

    def _checked_names(self) -> tuple[str, ...]:
        """The columns of the file, if names and types are those of its entry and table."""
        file, table, found = self.file, self.table, self.parquet.schema_arrow
        names = tuple(found.names)
        if file.columns.keys() != set(names) or len(names) != len(file.columns):
            odd = sorted(file.columns.keys() ^ set(names)) or sorted(names)
            raise broken(file, f"does not have the columns that its entry lists: {', '.join(odd)}")
        unknown = [name for name in names if name not in table]
        if unknown:
            raise broken(file, f"has the column {unknown[0]!r}, which no {table.name} row has")
        if found.equals(_declared_schema(table.name, names, self.columns)):
            return names
        for one in found:
            declared = table[one.name].type
            if _type_text(one.type) != canonical_type(declared):
                raise broken(
                    file, f"column {one.name} is of type {one.type}, expected {declared}", one.name
                )
        return names

    def _check_counts(self) -> None:
        metadata, file = self.parquet.metadata, self.file
        if self.row_groups.stop > metadata.num_row_groups:
            there = metadata.num_row_groups
            raise broken(file, f"has {there} row groups, expected {self.row_groups.stop} or more")
        groups = [metadata.row_group(index) for index in self.row_groups]
        rows = tuple(group.num_rows for group in groups)
        if rows != file.row_groups or file.first_row + file.rows > sum(rows):
            raise broken(
                file, f"has row groups of {list(rows)} rows, expected {list(file.row_groups)}"
            )
        alone = file.rows == sum(rows)
        leaves = _leaves_of(self.table.name, self._names)
        for name in self.columns:
            expected = file.columns[name].values
            for leaf in leaves[name]:
                found = sum([group.column(leaf).num_values for group in groups])
                # A row without values, null or an empty list, counts as one in a footer.
                low = max(expected, file.rows) if self.table[name].is_list else file.rows
                high = expected + file.rows if self.table[name].is_list else file.rows
                if found < low or (alone and found > high):
                    raise broken(
                        file,
                        f"column {name} has {found} values in its footer, expected {low}",
                        name,
                    )


@cache
def _declared_schema(table_name: str, names: tuple[str, ...], read: tuple[str, ...]) -> pa.Schema:
    columns = [TABLES[table_name][name] for name in names]
    return pa.schema(
        [
            one.field.with_type(_TEXT) if one.is_text and one.name in read else one.field
            for one in columns
        ]
    )


def _type_text(column_type: pa.DataType) -> str:
    try:
        return canonical_type(column_type)
    except SchemaError:
        return "another"


@cache
def _leaves_of(table_name: str, names: tuple[str, ...]) -> dict[str, range]:
    """The Parquet columns of each column: a struct has one for each of its fields."""
    leaves: dict[str, range] = {}
    start = 0
    for name in names:
        column_type = TABLES[table_name][name].type
        inner = column_type.value_type if pa.types.is_list(column_type) else column_type
        stop = start + (inner.num_fields if pa.types.is_struct(inner) else 1)
        leaves[name] = range(start, stop)
        start = stop
    return leaves


def broken(file: DataFile, found: str, column: str | None = None) -> DatasetError:
    """The error of a data file that is not what its entry says."""
    return DatasetError(f"{file.path} {found}", hint=_TRUST_HINT, path=file.path, column=column)

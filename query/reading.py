"""Columns of one capture from its file, checked against its manifest entry before and after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.datafile import OpenFile, broken
from trajreplay.schema.columns import Column, Table
from trajreplay.schema.digest import column_digest
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.errors import SchemaError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.store import LocalStore

TEXT_LIMIT_BYTES = 256 << 20
WHOLE_LIMIT_BYTES = 64 << 20
_TEXT_GUESS_BYTES = 64
_KEYS = {*CaptureKey._fields, "row"}


def read_columns(
    store: LocalStore,
    entry: Entry,
    table: Table,
    columns: Sequence[str],
    *,
    verify: bool = True,
) -> pa.Table:
    """Read columns of one capture in row order.

    Args:
        store: The lake.
        entry: The capture.
        table: The table they belong to.
        columns: Their names, in the order wanted.
        verify: Whether the digests of what is read are verified.

    Returns:
        One row per sample with the declared types; columns that the capture lacks are null.

    Raises:
        SchemaError: A name is not declared.
        DatasetError: The file is not what the entry says.
    """
    wanted = _declared(table, columns)
    file = entry.file(table.name)
    if file is None:
        return _schema(wanted).empty_table()
    there = [column for column in wanted if column.name in file.columns]
    if not there:
        return _finished(file, entry, wanted, {}, file.rows)
    with OpenFile(store, file, table, [column.name for column in there]) as opened:
        return read_opened(opened, entry, wanted, verify=verify)


def read_opened(
    opened: OpenFile, entry: Entry, wanted: Sequence[Column], *, verify: bool = True
) -> pa.Table:
    """Read what a file was opened for, and make up the other wanted columns.

    Raises:
        DatasetError: The file is not what the entry says.
    """
    file = opened.file
    found = opened.read(opened.row_groups)
    if found.num_rows < file.first_row + file.rows:
        raise broken(file, f"holds {found.num_rows} rows, expected {file.rows}")
    named = _named(found.slice(file.first_row, file.rows))
    return _finished(file, entry, wanted, named, file.rows, verify=verify)


def read_batches(
    store: LocalStore, entry: Entry, table: Table, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read columns of one capture in bounded pieces, for a scan.

    A capture that takes no more than 64 MiB is read and its digests are verified as in
    `read_columns`; a larger one comes a row group at a time, without.

    Raises:
        SchemaError: A name is not declared.
        DatasetError: The file is not what the entry says.
    """
    wanted = _declared(table, columns)
    file = entry.file(table.name)
    there = [column for column in wanted if file is not None and column.name in file.columns]
    if file is None or not there or decoded_bytes(file, there) <= WHOLE_LIMIT_BYTES:
        yield from read_columns(store, entry, table, columns).to_batches()
        return
    with OpenFile(store, file, table, [column.name for column in there]) as opened:
        start = -file.first_row  # of the row group, among the rows of the capture
        for group in opened.row_groups:
            found = opened.read([group])
            first, last = max(-start, 0), min(file.rows - start, found.num_rows)
            named = _named(found.slice(first, last - first))
            yield from _finished(
                file, entry, wanted, named, last - first, start=start + first
            ).to_batches()
            start += found.num_rows


def decoded_bytes(file: DataFile, columns: Iterable[Column]) -> int:
    """What columns of a capture take in memory, as its entry counts their values."""
    return sum(file.columns[column.name].values * _width(column.type) for column in columns)


@cache
def _width(column_type: pa.DataType) -> int:
    if pa.types.is_list(column_type):
        return _width(column_type.value_type)
    if pa.types.is_struct(column_type):
        return sum(_width(field.type) for field in column_type)
    text = pa.types.is_string(column_type)
    return _TEXT_GUESS_BYTES if text else -(-column_type.bit_width // 8)


def _schema(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([column.field for column in columns])


def _named(found: pa.Table) -> dict[str, pa.ChunkedArray]:
    return {name: found.column(index) for index, name in enumerate(found.column_names)}


def _declared(table: Table, names: Sequence[str]) -> list[Column]:
    unknown = [name for name in names if name not in table]
    if unknown:
        raise SchemaError(
            f"{table.name} has no column {unknown[0]!r}, expected one of {', '.join(table.names)}"
        )
    return [table[name] for name in names]


def _finished(
    file: DataFile,
    entry: Entry,
    wanted: Sequence[Column],
    found: dict[str, pa.ChunkedArray],
    rows: int,
    *,
    start: int = 0,
    verify: bool = False,
) -> pa.Table:
    arrays = []
    for column in wanted:
        values = found.get(column.name)
        if values is None:
            if not column.nullable and rows:
                raise broken(file, f"lacks the column {column.name}", column.name)
            arrays.append(pa.nulls(rows, column.type))
            continue
        values = checked(file, column, values)
        digest = None
        if column.name in _KEYS:
            expected = key_values(entry.key, column.name, len(values), start)
            check_key(file, entry, column.name, values, expected)
            digest = _key_digest(entry.key, column, rows) if verify else None
        if verify:
            check_digest(file, column.name, values, digest)
        arrays.append(values)
    return pa.Table.from_arrays(arrays, schema=_schema(wanted))


def checked(file: DataFile, column: Column, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as they come out of a file, in the declared type and without undeclared nulls.

    Raises:
        DatasetError: Null rows or elements that the declaration rules out, or too much text.
    """
    if column.is_text:
        values = _plain_text(file, column.name, values)
    if values.type != column.type:
        values = values.cast(column.type)
    if values.null_count and not column.nullable:
        found = f"column {column.name} has {values.null_count} nulls, expected none"
        raise broken(file, found, column.name)
    if column.is_list and any(_null_elements(chunk.values) for chunk in values.chunks):
        raise broken(file, f"column {column.name} has null elements, expected none", column.name)
    return values


def _plain_text(file: DataFile, name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    size = sum(len(chunk) * chunk.dictionary.nbytes for chunk in values.chunks)
    if size > TEXT_LIMIT_BYTES:  # a bound; only where it is passed is the size itself reckoned
        size = sum(
            pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0
            for chunk in values.chunks
        )
    if size > TEXT_LIMIT_BYTES:
        raise broken(
            file, f"column {name} decodes to {size} bytes of text, expected at most 256 MiB", name
        )
    try:
        plain = [chunk.dictionary_decode() for chunk in values.chunks]
    except pa.ArrowException as error:
        raise broken(file, f"column {name} cannot be decoded: {error}", name) from error
    return pa.chunked_array(plain, pa.string())


def _null_elements(values: pa.Array) -> bool:
    if values.null_count:
        return True
    return pa.types.is_struct(values.type) and any(child.null_count for child in values.flatten())


def check_digest(
    file: DataFile, name: str, values: pa.ChunkedArray, found: str | None = None
) -> None:
    """Hold values against the digest that was sealed when they were captured.

    Args:
        file: Where they were read.
        name: Their column.
        values: All of the capture's.
        found: Their digest, where it is known.

    Raises:
        DatasetError: They are not the values that were captured.
    """
    expected = file.columns[name].digest
    found = found or column_digest(values)
    if found != expected:
        raise broken(
            file,
            f"column {name} has the digest {found}, expected {expected}: its values are not "
            "those that were captured",
            name,
        )


def check_key(
    file: DataFile, entry: Entry, name: str, values: pa.ChunkedArray, expected: pa.Array
) -> None:
    """Hold a key column against the key under which the capture was committed.

    Raises:
        DatasetError: A row says it belongs to another capture.
    """
    if not values.equals(pa.chunked_array([expected.cast(values.type)])):
        found = f"column {name} is not that of its entry, {entry.key}, in every row"
        raise broken(file, found, name)


def _key_digest(key: CaptureKey, column: Column, rows: int) -> str:
    value = None if column.name == "row" else getattr(key, column.name)
    return _constant_digest(column.name, column.type, value, rows)


@lru_cache(maxsize=4096)
def _constant_digest(name: str, column_type: pa.DataType, value: Any, rows: int) -> str:
    """The digest of a key column, which captures of one rank share."""
    if name == "row":
        return column_digest(pa.array(range(rows), column_type))
    return column_digest(pa.repeat(pa.scalar(value, column_type), rows))


def key_values(key: CaptureKey, name: str, rows: int, start: int = 0) -> pa.Array:
    """A key column as the manifest has it."""
    if name == "row":
        return pa.array(range(start, start + rows), pa.int32())
    value = getattr(key, name)
    return pa.nulls(rows) if value is None else pa.repeat(pa.scalar(value), rows)

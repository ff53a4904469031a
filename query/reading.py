"""Columns of one capture from its file, checked against its manifest entry before and after."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trajreplay.schema.columns import Column, Table
from trajreplay.schema.digest import canonical_type, column_digest
from trajreplay.schema.entry import ColumnSeal, DataFile, Entry
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.store import LocalStore
from trajreplay.schema.tables import TABLES

FOOTER_LIMIT_BYTES = 16 << 20
TEXT_LIMIT_BYTES = 256 << 20
_MAGIC = b"PAR1"
_TRUST_HINT = "Restore the file from a copy of the lake. What else is affected: trajreplay validate"


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
    schema = pa.schema([column.field for column in wanted])
    if file is None:
        return schema.empty_table()
    there = [column for column in wanted if column.name in file.columns]
    found: dict[str, pa.ChunkedArray] = {}
    if there:
        with open_file(store, file, table) as reader:
            found = _decode(reader, file, table, there)
    arrays = [_finished(file, entry, column, found, verify=verify) for column in wanted]
    return pa.Table.from_arrays(arrays, schema=schema)


@contextmanager
def open_file(store: LocalStore, file: DataFile, table: Table) -> Iterator[pq.ParquetFile]:
    """Open a data file; its size, footer, schema and row groups are checked.

    Raises:
        DatasetError: The file is not what the entry says.
    """
    with os.fdopen(store.open(file.path), "rb", buffering=0) as content:
        size = os.fstat(content.fileno()).st_size
        if size != file.bytes:
            raise broken(file, f"has {size} bytes, expected {file.bytes}")
        tail = os.pread(content.fileno(), 8, max(size - 8, 0))
        footer_bytes = int.from_bytes(tail[:4], "little")
        if tail[4:] != _MAGIC or footer_bytes > min(FOOTER_LIMIT_BYTES, size - 12):
            raise broken(file, "does not end in the footer of a Parquet file of at most 16 MiB")
        texts = [name for name in file.columns if name in table and table[name].is_text]
        try:
            reader = pq.ParquetFile(
                pa.PythonFile(content, mode="r"), read_dictionary=texts, pre_buffer=False
            )
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            raise broken(file, f"has a footer that cannot be read: {error}") from error
        _check_schema(reader, file, table)
        _check_row_groups(reader, file)
        yield reader


def _declared(table: Table, names: Sequence[str]) -> list[Column]:
    unknown = [name for name in names if name not in table]
    if unknown:
        raise SchemaError(
            f"{table.name} has no column {unknown[0]!r}, expected one of {', '.join(table.names)}"
        )
    return [table[name] for name in names]


def _check_schema(reader: pq.ParquetFile, file: DataFile, table: Table) -> None:
    found = reader.schema_arrow
    names = tuple(found.names)
    if set(names) != set(file.columns) or len(names) != len(set(names)):
        odd = sorted(set(names) ^ set(file.columns)) or sorted(names)
        raise broken(file, f"does not have the columns that its entry lists: {', '.join(odd)}")
    unknown = [name for name in names if name not in table]
    if unknown:
        raise broken(file, f"has the column {unknown[0]!r}, which no {table.name} row has")
    if found.equals(_expected_schema(table.name, names)):
        return
    for one in found:
        declared = table[one.name].type
        if _type_text(one.type) != canonical_type(declared):
            raise broken(
                file, f"column {one.name} has the type {one.type}, expected {declared}", one.name
            )


@cache
def _expected_schema(table_name: str, names: tuple[str, ...]) -> pa.Schema:
    table = TABLES[table_name]
    dictionary = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            table[name].field.with_type(dictionary) if table[name].is_text else table[name].field
            for name in names
        ]
    )


def _type_text(column_type: pa.DataType) -> str:
    try:
        return canonical_type(column_type)
    except SchemaError:
        return "another"


def _check_row_groups(reader: pq.ParquetFile, file: DataFile) -> None:
    metadata = reader.metadata
    last = file.first_row_group + len(file.row_groups)
    if last > metadata.num_row_groups:
        raise broken(file, f"has {metadata.num_row_groups} row groups, expected {last} or more")
    rows = tuple(metadata.row_group(index).num_rows for index in _groups(file))
    if rows != file.row_groups or file.first_row + file.rows > sum(rows):
        raise broken(file, f"has row groups of {list(rows)} rows, expected {list(file.row_groups)}")


def check_counts(
    reader: pq.ParquetFile, file: DataFile, table: Table, columns: Iterable[str]
) -> None:
    """Hold the footer's value counts against the entry's, before any value takes memory.

    Raises:
        DatasetError: A column claims another number of values.
    """
    wanted = set(columns)
    groups = [reader.metadata.row_group(index) for index in _groups(file)]
    alone = file.rows == sum(file.row_groups)
    for index, name in enumerate(_leaf_names(table.name, tuple(reader.schema_arrow.names))):
        if name not in wanted:
            continue
        seal = file.columns[name]
        values = sum(group.column(index).num_values for group in groups)
        # A row without values, null or an empty list, counts as one value in a footer.
        low = max(seal.values, file.rows) if table[name].is_list else file.rows
        high = seal.values + file.rows if table[name].is_list else file.rows
        if values < low or (alone and values > high):
            raise broken(
                file, f"column {name} has {values} values in its footer, expected {low}", name
            )


@cache
def _leaf_names(table_name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The column of each Parquet leaf: a struct has one leaf per field."""
    return tuple(name for name in names for _ in range(_leaves(TABLES[table_name][name].type)))


def _leaves(column_type: pa.DataType) -> int:
    inner = column_type.value_type if pa.types.is_list(column_type) else column_type
    return int(inner.num_fields) if pa.types.is_struct(inner) else 1


def _groups(file: DataFile) -> range:
    return range(file.first_row_group, file.first_row_group + len(file.row_groups))


def _decode(
    reader: pq.ParquetFile, file: DataFile, table: Table, columns: list[Column]
) -> dict[str, pa.ChunkedArray]:
    names = [column.name for column in columns]
    check_counts(reader, file, table, names)
    try:
        decoded = reader.read_row_groups(list(_groups(file)), columns=names, use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise broken(file, f"cannot be decoded: {error}") from error
    decoded = decoded.slice(file.first_row, file.rows)
    if decoded.num_rows != file.rows:
        raise broken(file, f"holds {decoded.num_rows} rows, expected {file.rows}")
    return {name: decoded.column(index) for index, name in enumerate(decoded.column_names)}


def _finished(
    file: DataFile,
    entry: Entry,
    column: Column,
    found: dict[str, pa.ChunkedArray],
    *,
    verify: bool,
) -> pa.ChunkedArray | pa.Array:
    values = found.get(column.name)
    if values is None:
        if not column.nullable and file.rows:
            raise broken(file, f"lacks the column {column.name}, which every row has", column.name)
        return pa.nulls(file.rows, column.type)
    if column.is_text:
        values = plain_text(file, column.name, values)
    if values.type != column.type:
        values = values.cast(column.type)
    _check_nulls(file, column, values)
    seal = file.columns[column.name]
    if verify:
        check_digest(file, column.name, values, seal)
    if column.role == "key":
        check_key(file, entry, column.name, values)
    return values


def plain_text(file: DataFile, name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strings out of their dictionaries, if they fit the limit.

    Raises:
        DatasetError: They would take more than 256 MiB.
    """
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
    return pa.chunked_array([chunk.dictionary_decode() for chunk in values.chunks], pa.string())


def _check_nulls(file: DataFile, column: Column, values: pa.ChunkedArray) -> None:
    if values.null_count and not column.nullable:
        raise broken(
            file, f"column {column.name} has {values.null_count} nulls, expected none", column.name
        )
    if column.is_list and any(_null_elements(chunk.values) for chunk in values.chunks):
        raise broken(file, f"column {column.name} has null elements, expected none", column.name)


def _null_elements(values: pa.Array) -> bool:
    if values.null_count:
        return True
    return pa.types.is_struct(values.type) and any(child.null_count for child in values.flatten())


def check_digest(file: DataFile, name: str, values: Any, seal: ColumnSeal) -> None:
    """Hold values against the digest that was sealed when they were captured.

    Raises:
        DatasetError: They are not the values that were captured.
    """
    found = column_digest(values)
    if found != seal.digest:
        raise broken(
            file,
            f"column {name} has the digest {found}, expected {seal.digest}: its values are not "
            "those that were captured",
            name,
        )


def check_key(file: DataFile, entry: Entry, name: str, values: pa.ChunkedArray) -> None:
    """Hold a key column against the key under which the capture was committed.

    Raises:
        DatasetError: A row says it belongs to another capture.
    """
    if not len(values):
        return
    if name == "row":
        expected = pa.array(range(len(values)), values.type)
        same = values.combine_chunks().equals(expected)
    else:
        wanted = pa.scalar(getattr(entry.key, name), values.type)
        same = pc.all(pc.equal(values, wanted)).as_py()
    if not same:
        raise broken(
            file, f"column {name} is not the {name} of its entry, {entry.key}, in every row", name
        )


def broken(file: DataFile, found: str, column: str | None = None) -> DatasetError:
    """The error of a data file that is not what its entry says."""
    return DatasetError(f"{file.path} {found}", hint=_TRUST_HINT, path=file.path, column=column)

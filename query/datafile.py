"""Data files: opened only if their size, footer, schema and counts are what the entry says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.schema.columns import Table
from trajreplay.schema.digest import canonical_type
from trajreplay.schema.entry import DataFile
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.store import LocalStore
from trajreplay.schema.tables import TABLES

FOOTER_LIMIT_BYTES = 16 << 20
_MAGIC = b"PAR1"
_TRUST_HINT = "Restore the file from a copy of the lake. What else is affected: trajreplay validate"


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
        _check_rows(reader, file)
        yield reader


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


def _check_rows(reader: pq.ParquetFile, file: DataFile) -> None:
    metadata = reader.metadata
    last = file.first_row_group + len(file.row_groups)
    if last > metadata.num_row_groups:
        raise broken(file, f"has {metadata.num_row_groups} row groups, expected {last} or more")
    rows = tuple(metadata.row_group(index).num_rows for index in row_groups(file))
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
    groups = [reader.metadata.row_group(index) for index in row_groups(file)]
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


def row_groups(file: DataFile) -> range:
    """The row groups that hold rows of a capture."""
    return range(file.first_row_group, file.first_row_group + len(file.row_groups))


def broken(file: DataFile, found: str, column: str | None = None) -> DatasetError:
    """The error of a data file that is not what its entry says."""
    return DatasetError(f"{file.path} {found}", hint=_TRUST_HINT, path=file.path, column=column)

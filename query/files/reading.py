"""Columns of one capture from its file, checked against its manifest entry before and after."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.files.datafile import OpenFile
from trajreplay.query.files.footers import broken
from trajreplay.query.files.key_columns import KEY_NAMES, key_column
from trajreplay.query.files.page_headers import TEXT_LIMIT_BYTES
from trajreplay.query.files.pages import proven_columns
from trajreplay.schema.columns import Column, Table
from trajreplay.schema.digest import column_digest
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.errors import SchemaError
from trajreplay.schema.store import Store
from trajreplay.schema.tables import TABLES


def read_columns(
    store: Store,
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
    wanted = declared_columns(table, columns)
    file = entry.file(table.name)
    if file is None:
        return _schema(table.name, tuple(columns)).empty_table()
    there = [column for column in wanted if column.name in file.columns]
    if not there:
        return finished_columns(file, entry, wanted, {}, file.rows)
    with OpenFile(store, file, table, [column.name for column in there]) as opened:
        return read_opened(opened, entry, wanted, verify=verify)


def read_opened(
    opened: OpenFile,
    entry: Entry,
    wanted: Sequence[Column],
    *,
    verify: bool = True,
    short: bool = True,
) -> pa.Table:
    """Read columns that a file was opened for, and make up the other wanted ones.

    Args:
        opened: The file.
        entry: The capture.
        wanted: The columns.
        verify: Whether the digests of what is read are verified.
        short: Whether float lists may be taken the short way; otherwise each is decoded, and its
            own digest made.

    Raises:
        DatasetError: The file is not what the entry says.
    """
    file = opened.file
    table = opened.table
    there = [column.name for column in wanted if column.name in file.columns]
    lists = [name for name in there if verify and short and table[name].is_float_list]
    named = _read(opened, [name for name in there if name not in lists])
    proven = proven_columns(opened, lists, named)
    if len(proven) < len(lists):
        named |= _read(opened, [name for name in lists if name not in proven])
    named |= proven
    return finished_columns(file, entry, wanted, named, file.rows, verify=verify, proven=proven)


def _read(opened: OpenFile, columns: Sequence[str]) -> dict[str, pa.ChunkedArray]:
    file = opened.file
    found = opened.read(opened.row_groups, columns)
    if found.num_rows != file.rows:
        if found.num_rows < file.first_row + file.rows:
            raise broken(file, f"holds {found.num_rows} rows, expected {file.rows}")
        found = found.slice(file.first_row, file.rows)
    return by_name(found)


@lru_cache(maxsize=256)
def _schema(table_name: str, names: tuple[str, ...]) -> pa.Schema:
    """The schema of columns of a table."""
    return pa.schema([TABLES[table_name][name].field for name in names])


def by_name(found: pa.Table) -> dict[str, pa.ChunkedArray]:
    """The columns of a table."""
    return dict(zip(found.schema.names, found.columns, strict=True))


def declared_columns(table: Table, names: Sequence[str]) -> list[Column]:
    """The declarations of columns.

    Raises:
        SchemaError: A name is not declared.
    """
    unknown = [name for name in names if name not in table]
    if unknown:
        raise SchemaError(
            f"{table.name} has no column {unknown[0]!r}, expected one of {', '.join(table.names)}"
        )
    return [table[name] for name in names]


def finished_columns(
    file: DataFile,
    entry: Entry,
    wanted: Sequence[Column],
    found: dict[str, pa.ChunkedArray],
    rows: int,
    *,
    start: int = 0,
    verify: bool = False,
    proven: Collection[str] = (),
) -> pa.Table:
    """Wanted columns out of those that were read, each checked.

    Args:
        file: Where they were read.
        entry: The capture.
        wanted: The columns.
        found: What was read.
        rows: How many rows.
        start: Row of the capture that the first one is.
        verify: Whether the digests are verified; then it has to be the whole capture.
        proven: Columns whose digests were verified before.

    Raises:
        DatasetError: They are not what the entry says.
    """
    arrays = []
    for column in wanted:
        name = column.name
        values = found.get(name)
        if values is None:
            if not column.nullable and rows:
                raise broken(file, f"lacks the column {name}", name)
            values = pa.nulls(rows, column.type)
        elif name not in proven:
            values, digest = checked(file, column, values), None
            if name in KEY_NAMES:
                expected, digest = key_column(column, entry.key, start, rows)
                if not values.equals(expected):
                    other = f"column {name} is not that of its entry, {entry.key}"
                    raise broken(file, f"{other}, in every row", name)
            if verify:
                check_digest(file, name, values, digest)
        arrays.append(values)
    names = tuple([column.name for column in wanted])
    return pa.Table.from_arrays(arrays, schema=_schema(file.table, names))


def checked(file: DataFile, column: Column, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values as they come out of a file, in the declared type and without undeclared nulls.

    Raises:
        DatasetError: Null rows or elements that the declaration rules out, or too much text.
    """
    if column.is_text:
        values = _plain_text(file, column.name, values)
    elif values.type != column.type:
        values = values.cast(column.type)
    if values.null_count and not column.nullable:
        found = f"column {column.name} has {values.null_count} nulls, expected none"
        raise broken(file, found, column.name)
    if column.is_list and any(_null_elements(chunk.values) for chunk in values.chunks):
        raise broken(file, f"column {column.name} has null elements, expected none", column.name)
    return values


def _plain_text(file: DataFile, name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    chunks = values.chunks
    size = sum([len(chunk) * chunk.dictionary.get_total_buffer_size() for chunk in chunks])
    if size > TEXT_LIMIT_BYTES:  # a bound; only where it is passed is the size itself reckoned
        size = sum(
            pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0
            for chunk in chunks
        )
    if size > TEXT_LIMIT_BYTES:
        raise broken(
            file, f"column {name} decodes to {size} bytes of text, expected at most 256 MiB", name
        )
    try:
        plain = [chunk.dictionary_decode() for chunk in chunks]
    except pa.ArrowException as error:
        raise broken(file, f"column {name} cannot be decoded: {error}", name) from error
    return pa.chunked_array(plain, pa.string())


def _null_elements(values: pa.Array) -> bool:
    if values.null_count or not isinstance(values, pa.StructArray):
        return bool(values.null_count)
    return any(child.null_count for child in values.flatten())


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

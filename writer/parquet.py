"""Columns to a Parquet file: row groups bounded in rows and bytes, no statistics on floats."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.schema.columns import Column, Table
from trajreplay.schema.digest import column_digest, list_digest
from trajreplay.schema.entry import ColumnSeal
from trajreplay.schema.filedigest import file_digest, footer_digest
from trajreplay.schema.lists import (
    buffer_bytes,
    elements,
    non_finite,
    non_finite_of,
    of_content,
    small_content,
)
from trajreplay.schema.tables import EXPERT_LISTS
from trajreplay.writer.encode import ListColumn
from trajreplay.writer.flatten import Array

ROW_GROUP_ROWS = 512
ROW_GROUP_BYTES = 32 << 20  # raw values of one column
_PAGE_BYTES = 1 << 20
_BATCH_VALUES = 1 << 16  # encoded at once: a sixth faster than the default of 1,024
_DICTIONARY_ROLES = ("key", "identity", "provenance")


def build_table(
    table: Table, columns: Mapping[str, pa.Array | ListColumn], rows: int
) -> tuple[pa.Table, tuple[int, ...]]:
    """Lay columns out as a table of one batch per row group.

    Args:
        table: The declared table.
        columns: Its columns by name, at least those that are not nullable.
        rows: Rows of every column.

    Returns:
        The table, in declared order, and the rows of each row group.
    """
    present = [column for column in table.columns if column.name in columns]
    stops = _row_groups([columns[column.name] for column in present], rows)
    batches = []
    for start, stop in zip([0, *stops], stops, strict=False):
        arrays = [_slice(columns[column.name], start, stop) for column in present]
        batches.append(pa.RecordBatch.from_arrays(arrays, schema=_schema(present)))
    sizes = tuple(batch.num_rows for batch in batches)
    return pa.Table.from_batches(batches, schema=_schema(present)), sizes


class DataFileWriter:
    """A data file that is being written: row groups one after the other, durable once closed.

    Args:
        path: A new file.
        table: The declared table.
        schema: Those of its columns that the file has, in declared order.
    """

    def __init__(self, path: str, table: Table, schema: pa.Schema) -> None:
        names = set(schema.names)
        present = [column for column in table.columns if column.name in names]
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o644), "wb")
        self._writer = pq.ParquetWriter(
            self._file,
            schema,
            compression="lz4",
            use_dictionary=[_leaf(one) for one in present if _repeats(one)],
            write_statistics=[one.name for one in present if one.role == "key"],
            data_page_size=_PAGE_BYTES,
            write_batch_size=_BATCH_VALUES,
            store_schema=False,
        )
        self._groups = 0

    def add(self, data: pa.Table, row_groups: Sequence[int]) -> int:
        """Write the rows of a capture; returns the number of its first row group."""
        first, start = self._groups, 0
        for rows in row_groups:
            self._writer.write_table(data.slice(start, rows), row_group_size=max(rows, 1))
            start += rows
        self._groups += len(row_groups)
        return first

    def close(self) -> tuple[int, str, str]:
        """Finish the file and make it durable.

        Returns:
            Its size, the digest of its footer, and the digest of all its bytes.
        """
        with self._file as file:
            self._writer.close()
            file.flush()
            descriptor = file.fileno()
            os.fsync(descriptor)
            size = os.fstat(descriptor).st_size
            return size, footer_digest(descriptor, size), file_digest(descriptor)

    def abandon(self) -> None:
        """Leave the file as far as it came, which nobody will read."""
        if not self._file.closed:
            with contextlib.suppress(OSError, pa.ArrowException), self._file:
                self._writer.close()


def write_table(
    path: str, table: Table, data: pa.Table, row_groups: Sequence[int]
) -> tuple[int, str, str]:
    """Write a table to a new file and make it durable.

    Returns:
        As `DataFileWriter.close`.
    """
    writer = DataFileWriter(path, table, data.schema)
    try:
        writer.add(data, row_groups)
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def seal_columns(
    data: pa.Table,
    source_dtypes: Mapping[str, str],
    columns: Mapping[str, pa.Array | ListColumn] | None = None,
) -> dict[str, ColumnSeal]:
    """Digest and counts of every column of a table.

    Args:
        data: The table.
        source_dtypes: dtype of each column as the producer held it.
        columns: What the table was laid out from, if it is known.
    """
    seals: dict[str, ColumnSeal] = {}
    for name, column in zip(data.column_names, data.itercolumns(), strict=True):
        source = source_dtypes.get(name)
        listed = None if columns is None else columns[name]
        if isinstance(listed, ListColumn) and listed.valid is None:
            seals[name] = _seal_lists(listed, source)
        else:
            seals[name] = seal_column(column, source)
    return seals


def _seal_lists(column: ListColumn, source_dtype: str | None) -> ColumnSeal:
    """Digest and counts of lists of numbers of which none is null, without a look at Arrow's."""
    values = np.ascontiguousarray(column.values)
    floats = values.dtype.kind == "f"
    lengths = column.lengths.astype(np.int64, copy=False)
    return ColumnSeal(
        digest=list_digest(column.column.type, lengths, values.view(np.uint8)),
        values=len(values),
        non_finite=non_finite_of(values) if floats else None,
        source_dtype=source_dtype,
    )


def seal_column(column: pa.ChunkedArray, source_dtype: str | None) -> ColumnSeal:
    """Digest and counts of one column, over the values that its rows really have."""
    if column.num_chunks == 1 and (content := small_content(column.chunk(0))) is not None:
        return _known_seal(column.type, len(column), content, source_dtype)
    return _seal(column, source_dtype)


@lru_cache(maxsize=256)
def _known_seal(
    kind: pa.DataType, rows: int, content: tuple[bytes | None, ...], source_dtype: str | None
) -> ColumnSeal:
    return _seal(pa.chunked_array([of_content(kind, rows, content)]), source_dtype)


def _seal(column: pa.ChunkedArray, source_dtype: str | None) -> ColumnSeal:
    listed = pa.types.is_list(column.type)
    values = [elements(chunk) if listed else chunk for chunk in column.chunks]
    floats = pa.types.is_floating(column.type.value_type if listed else column.type)
    return ColumnSeal(
        digest=column_digest(column),
        values=sum(map(len, values)),
        nulls=column.null_count,
        non_finite=sum(map(non_finite, values)) if floats else None,
        source_dtype=source_dtype,
    )


def _schema(columns: Sequence[Column]) -> pa.Schema:
    return pa.schema([column.field for column in columns])


def _slice(column: pa.Array | ListColumn, start: int, stop: int) -> pa.Array:
    if isinstance(column, ListColumn):
        return column.rows(start, stop)
    return column.slice(start, stop - start)


def _repeats(column: Column) -> bool:
    """Whether few distinct values repeat in a column, so that a dictionary pays."""
    return column.role in _DICTIONARY_ROLES or column.name in ("loss_mask", *EXPERT_LISTS)


def _leaf(column: Column) -> str:
    """Path of a column's values in a Parquet schema."""
    if column.is_list and not pa.types.is_struct(column.type.value_type):
        return f"{column.name}.list.element"
    return column.name


def _row_groups(columns: Sequence[Any], rows: int) -> list[int]:
    """Last row, exclusive, of each row group."""
    if rows <= ROW_GROUP_ROWS and max(map(_raw_bytes, columns), default=0) <= ROW_GROUP_BYTES:
        return [rows] if rows else []
    ends = [end for column in columns if (end := _byte_ends(column)) is not None]
    stops: list[int] = []
    while (start := stops[-1] if stops else 0) < rows:
        stop = min(rows, start + ROW_GROUP_ROWS)
        for end in ends:
            begun = int(end[start - 1]) if start else 0
            stop = min(stop, int(np.searchsorted(end, begun + ROW_GROUP_BYTES, side="right")))
        stops.append(max(stop, start + 1))
    return stops


def _raw_bytes(column: pa.Array | ListColumn) -> int:
    return int(column.values.nbytes if isinstance(column, ListColumn) else buffer_bytes(column))


def _byte_ends(column: pa.Array | ListColumn) -> Array | None:
    """Raw bytes of a column up to and with each row; None where a row has a fixed width."""
    if isinstance(column, ListColumn):
        return np.asarray(column.offsets[1:] * column.values.itemsize)
    if pa.types.is_string(column.type):
        import pyarrow.compute as pc  # a twelfth of a second, for which few captures have text

        lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64)
        return np.cumsum(lengths)
    return None

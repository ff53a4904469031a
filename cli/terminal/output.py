"""Results in every format: rows, documents and text, to stdout or whole into a file."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.terminal.sink import Sink, opened, unnamed
from trajreplay.cli.terminal.text import CELL_WIDTH, aligned, cell, counted, printable
from trajreplay.cli.terminal.values import csv_line, json_text

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("table", "json", "ndjson", "csv", "parquet")
_TABLE_ROWS = 10_000


class Output:
    """Where the result of a command goes and how it is written.

    Args:
        format_name: table, json, ndjson, csv or parquet.
        path: File to write, or None for stdout.
        quiet: Whether notes and progress are left out.
        verbose: Whether more is shown.
    """

    def __init__(
        self, format_name: str, path: Path | None, *, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.format = format_name
        self.path = path
        self.quiet = quiet
        self.verbose = verbose
        if format_name == "parquet" and path is None and sys.stdout.isatty():
            raise click.UsageError("Parquet is binary: name a file with -o, or pipe it.")

    @property
    def is_text(self) -> bool:
        """Whether a person will read it."""
        return self.format == "table"

    @property
    def has_color(self) -> bool:
        """Whether the text may be coloured: on a terminal, unless NO_COLOR is set."""
        return self.path is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def note(self, text: str) -> None:
        """Say something beside the result, on stderr."""
        if not self.quiet:
            click.echo(printable(text, keep="\n"), err=True)

    def note_refused(self, refused: Mapping[str, str]) -> None:
        """Name files that were refused, where the result has no place for them."""
        for path, problem in refused.items():
            self.note(f"Refused: {path}: {problem}")

    def text(self, text: str) -> None:
        """Write the text form of a result; it is safe to print already."""
        with opened(self.path) as sink:
            sink.write(text.encode())

    def document(self, value: Any) -> None:
        """Write one JSON document."""
        with opened(self.path) as sink:
            sink.write(json_text(value, indent=2).encode() + b"\n")

    def lines(self, values: Iterable[Any]) -> None:
        """Write one JSON document a line."""
        with opened(self.path) as sink:
            for value in values:
                sink.write(json_text(value).encode() + b"\n")

    def rows(
        self, found: pa.Table | pa.RecordBatchReader, *, cell_width: int | None = CELL_WIDTH
    ) -> None:
        """Write rows in the chosen format.

        Args:
            found: The rows; a reader is consumed batch by batch.
            cell_width: Characters of a cell that a table shows; None shows all.
        """
        import pyarrow as pa

        reader = found.to_reader() if isinstance(found, pa.Table) else _started(found)
        with opened(self.path) as sink:
            if self.format == "table":
                self._write_table(reader, sink, cell_width)
            else:
                _WRITERS[self.format](reader, sink)

    def _write_table(
        self, reader: pa.RecordBatchReader, sink: Sink, cell_width: int | None
    ) -> None:
        import pyarrow.types as types

        rows: list[list[str]] = []
        left_out = 0
        for batch in reader:
            room = _TABLE_ROWS - len(rows)
            shown = batch.slice(0, room)
            columns = ([cell(value, cell_width) for value in one] for one in _columns(shown))
            rows += map(list, zip(*columns, strict=True))
            left_out += batch.num_rows - shown.num_rows
        right = [
            types.is_integer(one.type) or types.is_floating(one.type) or types.is_decimal(one.type)
            for one in reader.schema
        ]
        names = [printable(name) for name in reader.schema.names]
        sink.write(aligned(names, rows, right).encode())
        if left_out:
            self.note(
                f"{counted(left_out, 'further row')} not shown. "
                "For all of them: --format ndjson, csv or parquet."
            )


def _started(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """The same rows with the first batch at hand: what fails at once fails before any output."""
    import pyarrow as pa

    batches = iter(reader)
    first = list(itertools.islice(batches, 1))
    return pa.RecordBatchReader.from_batches(reader.schema, itertools.chain(first, batches))


def _columns(batch: pa.RecordBatch) -> Iterator[list[Any]]:
    """The columns of a batch as Python values.

    Raises:
        QueryError: Python cannot hold a value.
    """
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            yield column.to_pylist()
        except (ValueError, OverflowError, LookupError) as error:
            found = "holds a date outside of years 1 to 9999, or parts of a microsecond"
            raise _unwritten(field, f"{found}, which only Parquet can have") from error


def _unwritten(field: pa.Field, found: str) -> Exception:
    from trajreplay.schema import QueryError

    return QueryError(
        f"column {field.name} is of type {field.type} and {found}",
        hint=f"Cast it to text in the statement: {field.name}::varchar",
        column=field.name,
    )


def _records(reader: pa.RecordBatchReader) -> Iterator[list[tuple[str, Any]]]:
    """Each row as (name, value) pairs: two columns may have the same name."""
    names = reader.schema.names
    for batch in reader:
        for row in zip(*_columns(batch), strict=True):
            yield list(zip(names, row, strict=True))


def _write_json(reader: pa.RecordBatchReader, sink: Sink) -> None:
    sink.write(b"[")
    separator = b"\n"
    for record in _records(reader):
        sink.write(separator + b"  " + json_text(dict(record)).encode())
        separator = b",\n"
    sink.write(b"\n]\n" if separator != b"\n" else b"]\n")


def _write_ndjson(reader: pa.RecordBatchReader, sink: Sink) -> None:
    for record in _records(reader):
        sink.write(json_text(dict(record)).encode() + b"\n")


def _write_csv(reader: pa.RecordBatchReader, sink: Sink) -> None:
    sink.write(csv_line(reader.schema.names).encode())
    for record in _records(reader):
        sink.write(csv_line(value for _, value in record).encode())


def _write_parquet(reader: pa.RecordBatchReader, sink: Sink) -> None:
    """Write Parquet by way of an unnamed file: its writer wants to know where it stands.

    Statistics are kept for whole numbers and text only: those of floats hide NaN rows.
    """
    import pyarrow.parquet as pq
    import pyarrow.types as types

    counted_columns = [
        one.name for one in reader.schema if types.is_integer(one.type) or types.is_string(one.type)
    ]
    for field in reader.schema:
        if not _has_parquet(field):
            raise _unwritten(field, "has no equal in Parquet")
    with unnamed() as (file, aside):
        with pq.ParquetWriter(
            aside,
            reader.schema,
            compression="zstd",
            write_statistics=counted_columns or False,
        ) as writer:
            for batch in reader:
                writer.write_batch(batch)
        aside.flush()
        file.seek(0)
        shutil.copyfileobj(file, sink)


def _has_parquet(field: pa.Field) -> bool:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([field])).close()
    except pa.ArrowNotImplementedError:
        return False
    return True


_WRITERS = {
    "json": _write_json,
    "ndjson": _write_ndjson,
    "csv": _write_csv,
    "parquet": _write_parquet,
}

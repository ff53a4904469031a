"""Results in every format: rows, documents and text, to stdout or whole into a file."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from trajreplay.cli.text import CELL_WIDTH, aligned, cell, counted, printable
from trajreplay.cli.values import csv_line, json_text

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("table", "json", "ndjson", "csv", "parquet")
_TABLE_ROWS = 10_000


class SinkError(Exception):
    """Writing failed, with the OSError as cause: not to be taken for a failure to read rows."""


@contextlib.contextmanager
def _as_sink_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkError(str(error)) from error


def _refuse_target(target: Path) -> None:
    """Refuse to replace what is no plain file, or anything of a lake."""
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise click.UsageError(
            f"-o {str(target)!r} is a link, folder or device, expected a regular file or a new one"
        )
    if any((folder / "lake.json").is_file() for folder in target.parents):
        raise click.UsageError(
            f"-o {str(target)!r} is inside a lake, which only captures write to; expected elsewhere"
        )


class Sink:
    """A stream for bytes whose failures are SinkError."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        """Write bytes."""
        with _as_sink_error():
            return self._stream.write(data)

    def flush(self) -> None:
        """Pass on what is buffered."""
        with _as_sink_error():
            self._stream.flush()


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

    def text(self, text: str) -> None:
        """Write the text form of a result; it is safe to print already."""
        with self._sink() as sink:
            sink.write(text.encode())

    def document(self, value: Any) -> None:
        """Write one JSON document."""
        with self._sink() as sink:
            sink.write(json_text(value, indent=2).encode() + b"\n")

    def lines(self, values: Iterable[Any]) -> None:
        """Write one JSON document a line."""
        with self._sink() as sink:
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
        with self._sink() as sink:
            if self.format == "table":
                self._write_table(reader, sink, cell_width)
            else:
                _WRITERS[self.format](reader, sink)

    @contextlib.contextmanager
    def _sink(self) -> Iterator[Sink]:
        """The stream to write to; a file appears under its name only when it is complete."""
        if self.path is None:
            sink = Sink(sys.stdout.buffer)
            yield sink
            sink.flush()
            return
        target = self.path.absolute()
        _refuse_target(target)
        with _as_sink_error():
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        aside = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                sink = Sink(file)
                yield sink
                sink.flush()
            with _as_sink_error():
                mask = os.umask(0)
                os.umask(mask)
                aside.chmod(0o666 & ~mask)  # mkstemp's own mode is for secrets
                aside.replace(target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise

    def _write_table(
        self, reader: pa.RecordBatchReader, sink: Sink, cell_width: int | None
    ) -> None:
        import pyarrow.types as types

        rows: list[list[str]] = []
        left_out = 0
        for batch in reader:
            room = _TABLE_ROWS - len(rows)
            shown = batch.slice(0, room)
            columns = (
                [cell(value, cell_width) for value in one.to_pylist()] for one in shown.columns
            )
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


def _records(reader: pa.RecordBatchReader) -> Iterator[list[tuple[str, Any]]]:
    """Each row as (name, value) pairs: two columns may have the same name."""
    names = reader.schema.names
    for batch in reader:
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
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
    with tempfile.TemporaryFile() as file:
        with pq.ParquetWriter(
            file,
            reader.schema,
            compression="zstd",
            write_statistics=counted_columns or False,
        ) as writer:
            for batch in reader:
                writer.write_batch(batch)
        file.seek(0)
        shutil.copyfileobj(file, sink)


_WRITERS = {
    "json": _write_json,
    "ndjson": _write_ndjson,
    "csv": _write_csv,
    "parquet": _write_parquet,
}

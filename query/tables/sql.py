"""One SELECT by a user over the tables of a lake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from trajreplay.query.manifest.catalog import Catalog
from trajreplay.query.tables.connection import (
    MEMORY_BYTES,
    TIME_LIMIT_S,
    Run,
    connect,
    connect_empty,
    interruptible,
    interrupts_heard,
)
from trajreplay.query.tables.errors import TABLES_BY_NAME, check_statement, translated
from trajreplay.query.tables.types import refuse_for_polars, refuse_types, refuse_values
from trajreplay.query.tables.visible import Visible
from trajreplay.schema.errors import QueryError

if TYPE_CHECKING:
    import duckdb

if TYPE_CHECKING:
    import polars

# The text is bound, never spliced: `query` takes one SELECT, on a connection that opens no file.
_BOUND = "SELECT * FROM query($1)"


@dataclass(frozen=True)
class SqlResult:
    """Rows of a statement, and what was left out of them.

    Args:
        table: The rows; lists and strings have 64-bit offsets.
        notes: Capture sets that the tables did not show, one sentence a kind.
        is_partial: Whether some of them are incomplete or damaged, rather than superseded.
        tables: The tables of the lake that it read, however few of their rows it took.
    """

    table: pa.Table
    notes: tuple[str, ...] = ()
    is_partial: bool = False
    tables: frozenset[str] = frozenset()

    def arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return self.table

    def polars(self) -> polars.DataFrame:
        """The rows as a Polars frame.

        Raises:
            QueryError: A column is of a type that Polars does not have.
        """
        import polars

        refuse_for_polars(self.table.schema)
        frame = polars.from_arrow(self.table)
        assert isinstance(frame, polars.DataFrame)
        return frame


@dataclass(frozen=True)
class SqlQuery:
    """A statement, and what it may see and take. It runs when it is asked for rows.

    Args:
        catalog: The lake.
        text: One SELECT over its tables, in DuckDB's dialect.
        run: Show this run only.
        attempt: Show the lineage of this attempt, instead of the newest.
        allow_partial: Show incomplete capture sets and superseded attempts too.
        memory_bytes: What DuckDB may take.
        threads: Threads of DuckDB; all cores if omitted. Sums of floats depend on the order in
            which threads finish: give 1 where the last bit matters.
        time_limit_s: When it is stopped.
    """

    catalog: Catalog
    text: str
    run: str | None = None
    attempt: int | None = None
    allow_partial: bool = False
    memory_bytes: int = MEMORY_BYTES
    threads: int | None = None
    time_limit_s: float = TIME_LIMIT_S

    def result(self) -> SqlResult:
        """Run it and keep its rows.

        Raises:
            QueryError: It is wrong, tries more than to read the tables, takes too much, or has a
                column that Arrow cannot hold as it is.
            DatasetError: A file that it reads is not what its entry says.
        """
        with self._open() as (relation, run, visible):
            refuse_types(relation)
            table = run(relation.to_arrow_table)
            for batch in table.to_batches():
                refuse_values(batch)
            read = frozenset(visible.scanned)
            return SqlResult(table, visible.notes(), visible.is_partial, read)

    def arrow(self) -> pa.Table:
        """The rows as an Arrow table; as `result`."""
        return self.result().arrow()

    def polars(self) -> polars.DataFrame:
        """The rows as a Polars frame; as `result`."""
        return self.result().polars()

    @contextmanager
    def relation(self) -> Iterator[duckdb.DuckDBPyRelation]:
        """The statement as a DuckDB relation, valid inside the block; each read runs it again.

        Reads are in the caller's thread, where DuckDB may hear of Ctrl-C only when it is done.

        Raises:
            QueryError, DatasetError: As for `result`, also for what is done with the relation.
        """
        with self._open() as (relation, _, visible), self._translating(visible):
            yield relation

    @contextmanager
    def stream(self) -> Iterator[tuple[pa.RecordBatchReader, Visible]]:
        """Run it and take its rows a batch at a time, inside the block.

        `notes()` of the second value is complete once the rows are read.

        Raises:
            QueryError, DatasetError: As for `result`, also while the rows are read.
        """
        with self._open() as (relation, run, visible):
            refuse_types(relation)
            rows = run(relation.to_arrow_reader)
            yield pa.RecordBatchReader.from_batches(rows.schema, _batches(run, rows)), visible

    def explain(self) -> str:
        """The plan, without running it.

        Raises:
            QueryError: It is wrong, or tries more than to read the tables.
        """
        with self._open() as (relation, run, _):
            return str(run(relation.explain))

    @contextmanager
    def _open(self) -> Iterator[tuple[duckdb.DuckDBPyRelation, Run, Visible]]:
        visible = Visible(
            self.catalog,
            run_id=self.run,
            attempt=self.attempt,
            allow_partial=self.allow_partial,
        )
        with (
            connect(
                visible,
                memory_bytes=self.memory_bytes,
                threads=self.threads,
                time_limit_s=self.time_limit_s,
            ) as connection,
            interruptible(connection) as run_in_thread,
        ):
            with interrupts_heard():
                check_statement(connection, self.text)

            def run(work: Callable[[], Any]) -> Any:
                with self._translating(visible):
                    return run_in_thread(work)

            relation = run(lambda: connection.sql(_BOUND, params=[self.text]))
            yield relation, run, visible

    @contextmanager
    def _translating(self, visible: Visible) -> Iterator[None]:
        import duckdb

        try:
            with interrupts_heard():
                yield
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) and not visible.errors:
                raise  # a file that the caller had open, not one of the lake
            raise translated(error, visible.errors, self.text) from error


def _batches(run: Run, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    while (batch := run(lambda: next(rows, None))) is not None:
        refuse_values(batch)
        yield batch


def check_sql(text: str, where: str) -> None:
    """Refuse a statement that no lake can answer, whatever it holds.

    Args:
        text: The statement.
        where: Where it stands, which a refusal begins with.

    Raises:
        QueryError: It is no SQL, not one SELECT, reads more than the tables of a lake, or names a
            table, column or function that there is not.

    >>> check_sql("SELECT count(*) FROM steps", "policy.toml")
    """
    import duckdb

    with connect_empty(None) as connection:
        for name, table in TABLES_BY_NAME.items():
            connection.register(name, table.arrow.empty_table())
        try:
            check_statement(connection, text)
            connection.sql(_BOUND, params=[text])  # bound, and not run
        except duckdb.Error as error:
            raise _at(where, translated(error, (), text)) from error
        except QueryError as error:
            raise _at(where, error) from error


def _at(where: str, error: Exception) -> Exception:
    assert isinstance(error, QueryError)
    return QueryError(f"{where}: {error.message}", hint=error.hint, **error.facts)


def run_sql(catalog: Catalog, text: str, **options: Any) -> SqlResult:
    """Run one SELECT over a lake; the options are those of `SqlQuery`.

    Raises:
        QueryError: It is wrong, tries more than to read the tables, or takes too much.
        DatasetError: A file that it reads is not what its entry says.
    """
    return SqlQuery(catalog, text, **options).result()

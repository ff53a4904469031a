"""One SELECT by a user over the tables of a lake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from trajreplay.query.catalog import Catalog
from trajreplay.query.connection import MEMORY_BYTES, TIME_LIMIT_S, connect
from trajreplay.query.sql_errors import check_statement, translated
from trajreplay.query.visible import Visible

if TYPE_CHECKING:
    import polars

# The text is bound, never spliced: `query` takes one SELECT, on a connection that opens no file.
_BOUND = "SELECT * FROM query($1)"


@dataclass(frozen=True)
class SqlQuery:
    """A statement and what it may see and take; made by `Lake.sql`, which see."""

    catalog: Catalog
    text: str
    run_id: str | None = None
    attempt: int | None = None
    allow_partial: bool = False
    memory_bytes: int = MEMORY_BYTES
    threads: int | None = None
    time_limit_s: float = TIME_LIMIT_S

    @contextmanager
    def relation(self) -> Iterator[tuple[duckdb.DuckDBPyRelation, Visible]]:
        """The statement as a DuckDB relation, valid inside the block; each read runs it again.

        Raises:
            QueryError: The statement is wrong, or tries more than to read the tables.
            DatasetError: A file that it reads is not what its entry says.
        """
        visible = Visible(
            self.catalog,
            run_id=self.run_id,
            attempt=self.attempt,
            allow_partial=self.allow_partial,
        )
        with connect(
            visible,
            memory_bytes=self.memory_bytes,
            threads=self.threads,
            time_limit_s=self.time_limit_s,
        ) as connection:
            check_statement(connection, self.text)
            try:
                yield connection.sql(_BOUND, params=[self.text]), visible
            except duckdb.Error as error:
                raise translated(error, visible, self.text) from error

    def explain(self) -> str:
        """The plan, without running the statement.

        Raises:
            QueryError: As for `relation`.
        """
        with self.relation() as (relation, _):
            return str(relation.explain())


@dataclass(frozen=True)
class SqlResult:
    """Rows of a statement, and what was left out of them.

    Args:
        table: The rows; lists and strings have 64-bit offsets.
        notes: Capture sets that the tables did not show, one sentence a kind.
        query: The statement, which can be read again as a DuckDB relation.
    """

    table: pa.Table
    notes: tuple[str, ...]
    query: SqlQuery

    def arrow(self) -> pa.Table:
        """The rows as an Arrow table."""
        return self.table

    def polars(self) -> polars.DataFrame:
        """The rows as a Polars frame."""
        import polars

        frame = polars.from_arrow(self.table)
        assert isinstance(frame, polars.DataFrame)
        return frame


def run_sql(query: SqlQuery) -> SqlResult:
    """Run a statement and keep its rows.

    Raises:
        QueryError: It is wrong, tries more than to read the tables, or takes too much.
        DatasetError: A file that it reads is not what its entry says.
    """
    with query.relation() as (relation, visible):
        return SqlResult(relation.to_arrow_table(), visible.notes(), query)


@contextmanager
def stream_sql(query: SqlQuery) -> Iterator[tuple[pa.RecordBatchReader, Visible]]:
    """Run a statement and take its rows a batch at a time, inside the block.

    `notes()` of the second value is complete once the rows are read.

    Raises:
        QueryError, DatasetError: As for `run_sql`, also while the rows are read.
    """
    with query.relation() as (relation, visible):
        try:
            yield relation.to_arrow_reader(), visible
        except (pa.ArrowException, OSError) as error:
            raise translated(error, visible, query.text) from error

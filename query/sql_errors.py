"""What is wrong with a statement, in words: DuckDB's errors as ours, with the names there are."""

from __future__ import annotations

import difflib
import re

import duckdb

from trajreplay.query.samples import SAMPLES
from trajreplay.query.visible import Visible
from trajreplay.schema.errors import QueryError
from trajreplay.schema.tables import TABLES

_TABLES = TABLES | {SAMPLES.name: SAMPLES}
TABLE_NAMES = tuple(_TABLES)
_HINTS = {
    "EXPLAIN": "To see the plan: trajreplay sql --explain with the statement alone.",
    "MULTI": "PIVOT needs its values here: PIVOT ... ON column IN ('a', 'b').",
}
_ONE_SELECT = "Give one SELECT over " + ", ".join(TABLE_NAMES) + "."
_TABLE = re.compile(r"Table with name (\S+) does not exist")
_COLUMN = re.compile(r'column (?:named )?"([^"]+)"')
_ALIAS = re.compile(r'Referenced table "([^"]+)" not found')
_LOCATION = re.compile(
    r"\n+LINE \d+: (?:.*__duckdb_source|.*relation_|SELECT \* FROM query\(\$1\)).*",
    re.DOTALL | re.IGNORECASE,
)


def check_statement(connection: duckdb.DuckDBPyConnection, text: str) -> None:
    """Refuse what is not one SELECT, by name.

    This only words the refusal; what keeps a statement from doing harm is that `query` takes
    nothing else and that the connection is locked.

    Raises:
        QueryError: A syntax error, no statement, several, or one of another kind.
    """
    check_text(text)
    try:
        statements = connection.extract_statements(text)
    except duckdb.Error as error:
        raise QueryError(_message(error), hint=_ONE_SELECT) from error
    if len(statements) != 1:
        found = f"{len(statements)} statements" if statements else "no statement"
        raise QueryError(f"found {found}, expected one SELECT", hint=_ONE_SELECT)
    kind = statements[0].type.name
    if kind != "SELECT":
        word = "PIVOT without IN" if kind == "MULTI" else kind.replace("_", " ")
        raise QueryError(
            f"found a statement of kind {word}, expected one SELECT: a lake is only read",
            hint=_HINTS.get(kind, _ONE_SELECT),
        )


def check_text(text: str) -> None:
    """Refuse what is no Unicode text: DuckDB takes UTF-8.

    Raises:
        QueryError: It has half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeError as error:
        raise QueryError(f"{text!r} is no valid text: {error}") from error


def translated(
    error: Exception, visible: Visible, text: str, *, statement: bool = True
) -> Exception:
    """The error to raise for one of DuckDB's: that of the scan beneath it, if there was one.

    Args:
        error: What DuckDB raised.
        visible: What was read.
        text: The statement or expression.
        statement: Whether it is a statement, which may name tables.
    """
    if visible.errors:
        return visible.errors[0]
    message = _message(error)
    if isinstance(error, duckdb.OutOfMemoryException):
        return QueryError(message, hint="Give it more memory: --memory 8GiB, or read less.")
    if isinstance(error, duckdb.InterruptException):
        return QueryError("the statement took too long and was stopped", hint="Read less.")
    if isinstance(error, duckdb.PermissionException):
        return QueryError(
            f"{message}: a statement reads the tables of the lake only", hint=_ONE_SELECT
        )
    if match := _TABLE.search(message):
        if not statement:
            return QueryError(
                f"found a subquery over {match[1]}, expected a condition on the columns of one row"
            )
        return QueryError(
            f"no table {match[1]!r}, expected one of {', '.join(TABLE_NAMES)}",
            hint="To list tables and columns: trajreplay schema",
        )
    if (name := missing_name(error)) is not None:
        return unknown_column(name, text)
    return QueryError(message)


def missing_name(error: Exception) -> str | None:
    """The column, or the table before its point, that a statement names and that is not there."""
    match = _COLUMN.search(str(error)) or _ALIAS.search(str(error))
    return match[1] if isinstance(error, duckdb.BinderException) and match else None


def unknown_column(name: str, text: str) -> QueryError:
    """The error of a column that is in none of the tables that a text mentions."""
    mentioned = [table for table in TABLE_NAMES if re.search(rf"\b{table}\b", text, re.IGNORECASE)]
    columns = {
        column: None for table in mentioned or TABLE_NAMES for column in _TABLES[table].names
    }
    near = difflib.get_close_matches(name, columns, n=3, cutoff=0.5)
    where = " or ".join(mentioned) or "any table"
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    return QueryError(
        f"no column {name!r} in {where}, expected one of {', '.join(columns)}{meant}",
        hint="To list tables and columns: trajreplay schema",
        column=name,
    )


def _message(error: Exception) -> str:
    return _LOCATION.sub("", str(error)).strip()

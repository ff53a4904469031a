"""What is wrong with a statement, in words: DuckDB's errors as ours, with the names there are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trajreplay.query.tables.samples import SAMPLES
from trajreplay.schema.errors import DatasetError, QueryError
from trajreplay.schema.tables import TABLES

if TYPE_CHECKING:
    import duckdb

TABLES_BY_NAME = TABLES | {SAMPLES.name: SAMPLES}
TABLE_NAMES = tuple(TABLES_BY_NAME)
_HINTS = {
    "EXPLAIN": "To see the plan: trajreplay sql --explain with the statement alone.",
    "MULTI": "PIVOT needs its values here: PIVOT ... ON column IN ('a', 'b').",
}
_MORE_MEMORY = "Give it more memory: --memory 8GiB, or read less."
_MORE_ROOM = "Set TMPDIR, where it puts what memory has no room for, to a folder with more.\n"
# How DuckDB's errors about this machine begin: (what to say instead, what to do).
_LIMITS = {
    "Out of Memory Error": ("", _MORE_MEMORY),
    "INTERRUPT Error": ("the statement took too long and was stopped", "Read less."),
    "IO Error": ("", _MORE_ROOM + _MORE_MEMORY),
}
_ONE_SELECT = "Give one SELECT over " + ", ".join(TABLE_NAMES) + "."
_TABLE = re.compile(r"Table with name (\S+) does not exist")
_MISSING = (
    re.compile(r'Referenced (?:column|table) "([^"]+)" (?:was )?not found'),
    re.compile(r'does not have a column named "([^"]+)"'),
)
_CANDIDATES = re.compile(r"\n\s*(Candidate \w+:)\n((?:[ \t]+.*\n?)+)")
_NO_FUNCTION = re.compile(r"argument types '(.+)'\.")
_OF_LISTS = re.compile(r"(?:argument types|values of type) .*\[\]")
_ADVICE = re.compile(r"\n\nPossible solutions:.*", re.DOTALL)  # needs SET, which is refused
_SHOWN = 3
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
    import duckdb

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
        raise QueryError(f"{text!r} is no valid text, expected UTF-8") from error


def translated(
    error: Exception, scan: Sequence[Exception], text: str, *, statement: bool = True
) -> Exception:
    """The error to raise for one of DuckDB's: that of the scan beneath it, if there was one.

    Args:
        error: What DuckDB raised.
        scan: What went wrong beneath it, where the lake was read.
        text: The statement or expression.
        statement: Whether it is a statement, which may name tables.
    """
    import duckdb

    if scan:
        return _of_lake(scan[0])
    message = _message(error)
    for start, (instead, hint) in _LIMITS.items():
        if message.startswith(start):
            return QueryError(instead or message, hint=hint)
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
    name = missing_name(error)
    if name is not None and name not in _columns(text):  # it may be there, and out of reach
        return unknown_column(name, text)
    return QueryError(message, hint=_list_hint(message, text, statement=statement))


def _of_lake(error: Exception) -> Exception:
    """What ended the scan of a file: an error of ours as it is, one of the machine as ours."""
    if not isinstance(error, OSError):
        return error
    return DatasetError(
        f"{error.filename or 'a file of the lake'} cannot be read: {error.strerror or error}",
        hint="Once the machine lets it be read, run the statement again.",
    )


def _list_hint(message: str, text: str, *, statement: bool) -> str:
    """What to do where a column with a value for each token was taken for a number."""
    if not _OF_LISTS.search(message) and "UNNEST not supported here" not in message:
        return ""
    lists = [name for name in _columns(text) if re.search(rf"\b{name}\b", text) and _is_list(name)]
    name = lists[0] if lists else "log_probs"
    found = f"Columns with a value for each token are lists: list_avg({name}) is the mean of each"
    if not statement:
        return f"{found}, list_max({name}) the largest."
    return f"{found}, and\nselect avg(x) from (select unnest({name}) as x from ...) that of all."


def _is_list(name: str) -> bool:
    return any(table[name].is_list for table in TABLES_BY_NAME.values() if name in table)


def missing_name(error: Exception) -> str | None:
    """The column, or the table before its point, that a statement names and that is not there."""
    import duckdb

    if not isinstance(error, duckdb.BinderException):
        return None
    found = (pattern.search(str(error)) for pattern in _MISSING)
    return next((match[1] for match in found if match), None)


def _mentioned(text: str) -> list[str]:
    return [name for name in TABLE_NAMES if re.search(rf"\b{name}\b", text, re.IGNORECASE)]


def _columns(text: str) -> list[str]:
    """The columns of the tables that a text mentions, each once; of all if it mentions none."""
    tables = _mentioned(text) or TABLE_NAMES
    return list(dict.fromkeys(column for table in tables for column in TABLES_BY_NAME[table].names))


def unknown_column(name: str, text: str) -> QueryError:
    """The error of a column that is in none of the tables that a text mentions."""
    mentioned = _mentioned(text)
    columns = _columns(text)
    near = difflib.get_close_matches(name, columns, n=_SHOWN)
    if near:
        found = f"; did you mean {' or '.join(near)}?"
    else:
        found = f", expected one of {', '.join(columns)}" if mentioned else ""
    return QueryError(
        f"no column {name!r} in {' or '.join(mentioned) or 'any table'}{found}",
        hint="To list tables and columns: trajreplay schema",
        column=name,
    )


def _message(error: Exception) -> str:
    """DuckDB's words without what it says of our part of the statement, and not too many."""
    text = _ADVICE.sub("", _LOCATION.sub("", str(error)))
    called = _NO_FUNCTION.search(text)
    text = _CANDIDATES.sub(lambda found: _nearest(found, called[1] if called else ""), text)
    return text.replace("\t", "  ").strip()


def _nearest(found: re.Match[str], called: str) -> str:
    """The candidates that are most like what was called, and how many more there are."""
    lines = [line.strip() for line in found[2].splitlines()]
    near = difflib.get_close_matches(called, lines, n=_SHOWN, cutoff=0.0)
    more = [f"and {len(lines) - len(near)} more"] if len(lines) > len(near) else []
    return "".join(f"\n{line}" for line in (found[1], *(f"  {one}" for one in (*near, *more))))

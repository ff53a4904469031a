"""`--where`: one boolean expression over the rows of rollouts and of steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from trajreplay.query.manifest.catalog import Cohort
from trajreplay.query.tables.connection import connect_empty, interruptible
from trajreplay.query.tables.dataset import LakeTable
from trajreplay.query.tables.errors import check_text, missing_name, translated, unknown_column
from trajreplay.query.tables.visible import Visible
from trajreplay.schema.columns import Table
from trajreplay.schema.errors import QueryError
from trajreplay.schema.tables import ROLLOUTS, STEPS

if TYPE_CHECKING:
    import duckdb

Matches = dict[Cohort, dict[int, pa.Array]]
_EXAMPLE = 'Give one boolean expression, such as --where "rollout_id=120 and reward<0".'


def matching_rows(visible: Visible, where: str) -> Matches:
    """The rows for which an expression is true.

    It is parsed as an expression, never spliced into a statement, and evaluated where only the
    one table can be read. Its conditions on keys are applied to the manifest first.

    Args:
        visible: The captures to look at.
        where: The expression, over the columns of rollouts or of steps. A table that lacks one of
            its columns contributes nothing.

    Returns:
        By cohort and rank, (K,) int32: the matching rows.

    Raises:
        QueryError: It is no expression, not boolean, or valid on neither table.
    """
    import duckdb

    expression = _parsed(where)
    matches: Matches = {}
    missing: list[str] = []
    for table in (ROLLOUTS, STEPS):
        try:
            matches |= _of_table(table, visible, expression)
        except duckdb.Error as error:
            name = missing_name(error)
            if name is None or visible.errors:
                raise translated(error, visible.errors, where, statement=False) from error
            missing.append(name)
    if len(missing) == 2:
        raise unknown_column(missing[-1], "rollouts, steps")
    return matches


def _parsed(where: str) -> duckdb.Expression:
    import duckdb

    check_text(where)
    try:
        return duckdb.SQLExpression(where)
    except duckdb.Error as error:
        raise QueryError(f"--where {where!r} is no expression: {error}", hint=_EXAMPLE) from error


def _of_table(table: Table, visible: Visible, expression: duckdb.Expression) -> Matches:
    with (
        connect_empty(visible.catalog.store.folder) as connection,
        interruptible(connection) as run,
    ):
        rows = LakeTable(table, visible)
        return _by_cohort(run(partial(_found, connection, rows, expression)))


def _found(
    connection: duckdb.DuckDBPyConnection, table: LakeTable, expression: duckdb.Expression
) -> pa.Table:
    keys = ", ".join(table.table.key[:-1])
    rows = connection.from_arrow(table).set_alias(table.table.name)
    kind = rows.select(expression).types[0]
    if kind != "BOOLEAN":
        raise QueryError(f"--where {expression} is of type {kind}", hint=_EXAMPLE)
    return rows.filter(expression).aggregate(f"{keys}, list(row) AS rows", keys).to_arrow_table()


def _by_cohort(found: pa.Table) -> Matches:
    matches: Matches = {}
    lists = found.column("rows")
    for index, row in enumerate(found.drop_columns(["rows"]).to_pylist()):
        cohort = Cohort(row["run_id"], row["attempt"], row["rollout_id"], row.get("step_id"))
        matches.setdefault(cohort, {})[row["rank"]] = lists[index].values
    return matches

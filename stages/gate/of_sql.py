"""Statements of a policy: the number that each returns, held to its bounds."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from trajreplay.query.tables.samples import SAMPLES
from trajreplay.query.tables.sql import SqlQuery
from trajreplay.schema.errors import TrajReplayError
from trajreplay.stages.gate.check import Judged
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import is_number
from trajreplay.stages.gate.statement import SqlCheck

_JOINED = ("steps", "rollouts")
_WORDS = {
    "below": "<",
    "above": ">",
    "at_most": "<=",
    "at_least": ">=",
    "equals": "=",
}


def judged_sql(check: SqlCheck, found: Evidence) -> Judged:
    """The outcome of a statement; its tables show the lineage of the last attempt named."""
    bound = " and ".join(f"{_WORDS[name]} {one:g}" for name, one in check.bounds.items())
    problem = _unnamed(found)
    if problem:
        return Judged(False, None, bound, problem)
    statement = SqlQuery(
        found.catalog, check.query, run=found.run_id, attempt=found.last, threads=1
    )
    try:
        result = statement.result()
        problem = _unread(found, statement, result.tables)
    except TrajReplayError as error:
        return Judged(False, None, bound, error.message)
    if problem:
        return Judged(False, None, bound, problem)
    if result.is_partial:
        return Judged(False, None, bound, f"not all is there: {'; '.join(result.notes)}")
    rows = result.arrow()
    if rows.shape != (1, 1):
        return Judged(
            False, None, bound, f"it returns {rows.num_rows} x {rows.num_columns}, expected 1 x 1"
        )
    value = rows.column(0)[0].as_py()
    if not isinstance(value, int | float) or isinstance(value, bool):
        value = _as_number(value)
    if not is_number(value):
        return Judged(False, value, bound, f"it returns {value!r}, expected a finite number")
    kept = {
        "below": value < check.bounds.get("below", math.inf),
        "above": value > check.bounds.get("above", -math.inf),
        "at_most": value <= check.bounds.get("at_most", math.inf),
        "at_least": value >= check.bounds.get("at_least", -math.inf),
        "equals": value == check.bounds.get("equals", value),
    }
    broken = [name for name in check.bounds if not kept[name]]
    return Judged(not broken, value, bound, f"it is {value}" if broken else "")


def _as_number(value: Any) -> Any:
    """A decimal as a float; anything else as it is."""
    try:
        return value if isinstance(value, str | bytes | bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _unnamed(found: Evidence) -> str:
    """Why the tables of the last attempt would not show exactly the attempts that are named."""
    shown, attempt = {found.last}, found.last
    while (resumed := found.catalog.resumed_from(found.run_id, attempt)) is not None:
        attempt = resumed.attempt
        shown.add(attempt)
    if not found.catalog.by_attempt.get((found.run_id, found.last)):
        return f"attempt {found.last} recorded nothing"
    if shown != set(found.attempts):
        told = ",".join(map(str, sorted(shown)))
        return f"attempt {found.last} continues others than are named: its chain is {told}"
    return ""


def _unread(found: Evidence, statement: SqlQuery, tables: Collection[str]) -> str:
    """Why a statement says nothing of an attempt: it reads no row of it, whatever it returns.

    Numbers that are written down or generated bound nothing of it either.
    """
    if not tables:
        return "it reads no table of the lake"
    for attempt in sorted(found.standing):
        for table in sorted(tables):
            # A filter on a key is decided by the manifest; what `samples` joins is asked apart.
            asked = _JOINED if table == SAMPLES.name else (table,)
            texts = (f"SELECT 1 FROM {one} WHERE attempt = {attempt} LIMIT 1" for one in asked)
            if not any(replace(statement, text=one).result().table.num_rows for one in texts):
                return f"it reads {table}, of which attempt {attempt} recorded no row"
    return ""

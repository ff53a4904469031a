"""Hold a run against a policy: every check is made, and what is missing fails."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from trajreplay.query import Catalog, run_sql
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.errors import QueryError, TrajReplayError
from trajreplay.schema.layout import attempt_path, entry_path
from trajreplay.stages.gate.check import Judged
from trajreplay.stages.gate.checks import CHECKS, judged, sources
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.gathering import gather
from trajreplay.stages.gate.of_run import unasked
from trajreplay.stages.gate.policy import Policy, SqlCheck, is_number
from trajreplay.stages.gate.verdict import CheckVerdict, GateVerdict, in_order


def gate(
    catalog: Catalog,
    policy: Policy,
    run_id: str,
    attempts: Sequence[int],
    *,
    command_exit: int | None = None,
    command_signal: int | None = None,
) -> GateVerdict:
    """Hold the attempts that are named, and nothing else, against a policy.

    A run, attempt or value that is not there is no error: its checks fail.

    Args:
        catalog: The lake.
        policy: The checks and their bounds.
        run_id: The run.
        attempts: One attempt, or a chain in its order.
        command_exit: Exit code of the command that ran the last attempt, where it is known.
        command_signal: The signal that killed it.

    Raises:
        QueryError: No attempt is named, or one twice or out of order.
    """
    named = list(attempts)
    if not named or any(later <= earlier for earlier, later in pairwise(named)):
        raise QueryError(
            f"the attempts are {named}, expected one, or a chain in rising order such as 0,1"
        )
    found = gather(
        catalog,
        run_id,
        named,
        command_exit=command_exit,
        command_signal=command_signal,
        reads=sources(policy),
    )
    made = [
        CheckVerdict.of(check.name, check.phase, judged(check, found, policy), check.unit)
        for check in CHECKS
        if check.name in policy.checks or check.name in unasked(found, policy)
    ]
    made += [
        CheckVerdict.of(f"sql:{one.name}", "sql", judged_sql(one, found)) for one in policy.sql
    ]
    return GateVerdict(
        run_id=run_id,
        attempts=tuple(named),
        run=policy.run,
        checks=in_order(made),
        policy=policy.to_json(),
        policy_digest=policy.digest,
        lake=str(catalog.store),
        lake_digest=lake_digest(found),
        command_exit=command_exit,
        command_signal=command_signal,
    )


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
    try:
        result = run_sql(
            found.catalog, check.query, run=found.run_id, attempt=found.last, threads=1
        )
    except TrajReplayError as error:
        return Judged(False, None, bound, error.message)
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


def lake_digest(found: Evidence) -> str:
    """Digest of the names and bytes of all entries and records of the attempts."""
    state = hashlib.sha256()
    store = found.catalog.store
    paths = [attempt_path(found.run_id, one) for one in found.attempts]
    paths += [entry_path(key) for key in found.captures()]
    for path in sorted(paths):
        try:
            data = store.read(path, MAX_BYTES) if store.exists(path) else b""
        except TrajReplayError:
            data = b""  # unreadable: what it should have said fails a check
        state.update(f"{path}\n{len(data)}\n".encode())
        state.update(data)
    return "sha256:" + state.hexdigest()

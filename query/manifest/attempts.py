"""What a lake holds of each attempt of each run, also of one that captured nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from trajreplay.query.manifest.catalog import Catalog
from trajreplay.query.manifest.info import info

NOTHING_CAPTURED = "no rollout or step was captured"
_STATES = ("complete", "incomplete", "refused", "superseded")
_SUMS = ("samples", "tokens", "bytes")
_COUNTS = ("steps", "ranks", *_SUMS, *_STATES)
ATTEMPTS_HELD = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("attempt", pa.int64(), nullable=False),
        pa.field("rollouts", pa.int64(), nullable=False),
        pa.field("first_rollout", pa.int64()),
        pa.field("last_rollout", pa.int64()),
        *(pa.field(name, pa.int64(), nullable=False) for name in _COUNTS),
        pa.field("problem", pa.string()),
    ]
)


def attempts(
    catalog: Catalog,
    run_id: str | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> pa.Table:
    """One row an attempt: its rollouts, steps, ranks and amounts, and how many of them are whole.

    Args:
        catalog: The lake.
        run_id: Only this run.
        progress: Called with the capture sets done and all of them.

    Returns:
        By run and attempt. `problem` is the first of its capture sets', or that there is none.

    Raises:
        QueryError: There is no such run.
        DatasetError: An attempt record is damaged.
    """
    found = info(catalog, run_id, progress=progress).to_pylist()
    runs = catalog.runs if run_id is None else {run_id: catalog.runs[run_id]}
    held: dict[tuple[str, int], list[dict[str, Any]]] = {
        (run, attempt): [] for run, numbers in runs.items() for attempt in numbers
    }
    for one in found:
        held[one["run_id"], one["attempt"]].append(one)
    rows = [
        {"run_id": run, "attempt": attempt, **_summed(sets)}
        for (run, attempt), sets in held.items()
    ]
    return pa.Table.from_pylist(rows, schema=ATTEMPTS_HELD)


def _summed(sets: list[dict[str, Any]]) -> dict[str, Any]:
    rollouts = {one["rollout_id"] for one in sets}
    ranks = {rank for one in sets for rank in (*one["ranks"], *one["expected_ranks"])}
    problems = (one["problem"] for one in sets if one["problem"])
    return {
        "rollouts": len(rollouts),
        "first_rollout": min(rollouts, default=None),
        "last_rollout": max(rollouts, default=None),
        "steps": sum(one["step_id"] is not None for one in sets),
        "ranks": len(ranks),
        **{name: sum(one[name] for one in sets) for name in _SUMS},
        **{name: sum(one["status"] == name for one in sets) for name in _STATES},
        "problem": next(problems, None) if sets else NOTHING_CAPTURED,
    }

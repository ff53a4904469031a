"""Explanations as rows: the same columns and types whatever was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from trajreplay.stages.explain import Cluster, Explanation


def explanation_table(found: Sequence[Explanation]) -> pa.Table:
    """A row for each explanation, its numbers as they are."""
    import pyarrow as pa

    whole, text = pa.int64(), pa.string()
    types = {
        "run_id": text,
        "attempt": whole,
        "rollout_id": whole,
        "step_id": whole,
        "stage": text,
        "faults": text,
        "known_as": text,
        "text": text,
        "noun": text,
        "differ": whole,
        "of": whole,
        "misses_by": pa.float64(),
        "max_error": pa.float64(),
        "by_chance": whole,
        "residual": text,
        "note": text,
        "told": text,
        "searched": pa.bool_(),
        "warns": pa.bool_(),
        "weights": whole,
    }
    return _table(types, [_explanation(one) for one in found])


def _explanation(one: Explanation) -> dict[str, Any]:
    best = one.first
    said = {
        "faults": " ".join(best.faults) if best else None,
        "known_as": best.known_as if best else None,
        "max_error": best.max_error if best else None,
        "by_chance": best.by_chance if best else None,
        "text": one.text,
        "residual": "; ".join(one.residual),
    }
    return {**vars(one), **one.cohort._asdict(), **said}


def cluster_table(found: Sequence[Cluster]) -> pa.Table:
    """A row for each explanation across cohorts."""
    import pyarrow as pa

    whole, text = pa.int64(), pa.string()
    types = {
        "run_id": text,
        "stage": text,
        "faults": text,
        "known_as": text,
        "sentence": text,
        "when": text,
        "cohorts": whole,
        "judged": whole,
        "first_attempt": whole,
        "first_rollout_id": whole,
        "first_step_id": whole,
        "told": pa.bool_(),
        "warns": pa.bool_(),
        "doubt": text,
        "example": text,
        "text": text,
    }
    return _table(types, [_cluster(one) for one in found])


def _cluster(one: Cluster) -> dict[str, Any]:
    first = one.cohorts[0]
    said = {
        "faults": " ".join(one.faults),
        "cohorts": len(one.cohorts),
        "first_attempt": first.attempt,
        "first_rollout_id": first.rollout_id,
        "first_step_id": first.step_id,
        "text": one.text,
    }
    return {**vars(one), **said}


def _table(types: dict[str, Any], rows: Sequence[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    kept = [{name: row[name] for name in types} for row in rows]
    return pa.Table.from_pylist(kept, schema=pa.schema(list(types.items())))

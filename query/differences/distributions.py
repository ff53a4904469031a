"""What can be said of a field where samples have no partners: how many values, and their spread."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.differences.report import Distribution
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.columns import Column


def distribution(cohort: Cohort, column: Column, left: pa.Table, right: pa.Table) -> Distribution:
    """Compare the values of a column on both sides, unaligned."""
    numbers = [_summary(column, one[column.name].combine_chunks()) for one in (left, right)]
    count, mean, low, high = zip(*numbers, strict=True)
    return Distribution(cohort.rollout_id, cohort.step_id, column.name, count, mean, low, high)


def _summary(
    column: Column, values: pa.Array
) -> tuple[int, float | None, float | None, float | None]:
    flat = (values.flatten() if column.is_list else values).drop_null()
    if not pa.types.is_floating(flat.type) and not pa.types.is_integer(flat.type):
        return len(flat), None, None, None
    numbers = flat.cast(pa.float64())
    finite = numbers.filter(pc.is_finite(numbers))
    extremes = pc.min_max(finite).as_py()
    return len(flat), pc.mean(finite).as_py(), extremes["min"], extremes["max"]

"""Components of rewards as a list column, in the order of the names that the settings state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.errors import CaptureError, bare, listed, named, shown
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.records import SampleRecord, values_of
from trajreplay.schema.tables import ROLLOUTS

_COLUMN = ROLLOUTS["reward_components"]


def encode_components(
    records: Sequence[SampleRecord], names: Sequence[str], key: CaptureKey
) -> pa.Array:
    """The components of each record, NaN where one is missing; null where none were given.

    Args:
        records: The samples.
        names: The components of `reward.weights`, in order.
        key: The capture.

    Raises:
        CaptureError: They are no mapping to numbers, or have a name that the settings do not have.
    """
    rows = values_of(records, "reward_components")
    if rows.count(None) == len(rows):
        return pa.nulls(len(rows), _COLUMN.type)
    problems = [
        f"row {row}: reward_components of sample {named(record.sample_id)} {problem}"
        for row, record in enumerate(records)
        if (problem := _problem(record.reward_components, names))
    ]
    if problems:
        raise CaptureError(
            f"capture of {key}: {len(problems)} problems of samples:\n  {listed(problems)}",
            hint="Name every component, with its weight, in the settings: reward.weights.",
            problems=problems,
        )
    values = [
        math.nan if (value := row.get(name)) is None else float(value)
        for row in rows
        if row is not None
        for name in names
    ]
    ends = np.cumsum([0, *(0 if row is None else len(names) for row in rows)], dtype=np.int32)
    missing = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(
        pa.array(ends), pa.array(values, pa.float64()), type=_COLUMN.type, mask=missing
    )


def _problem(row: Any, names: Sequence[str]) -> str:
    if row is None:
        return ""
    if not isinstance(row, Mapping):
        return f"are {shown(row)}, expected an object of numbers by name"
    unknown = [name for name in row if name not in names]
    if unknown:
        return f"have {named(unknown[0])}, expected one of {', '.join(names) or 'none'}"
    odd = [name for name, value in row.items() if not _is_number(value)]
    return f"have {bare(odd[0])} = {shown(row[odd[0]])}, expected a number" if odd else ""


def _is_number(value: Any) -> bool:
    """Whether it is None or converts to a float, as numbers of torch and numpy do."""
    if value is None:
        return True
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)

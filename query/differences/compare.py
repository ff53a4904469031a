"""One column of aligned samples on both sides: where it differs first, in how many, by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.columns import Column
from trajreplay.schema.errors import QueryError

_BITS = {pa.float32(): pa.int32(), pa.float64(): pa.int64()}


@dataclass(frozen=True)
class Tolerance:
    """What counts as equal: |a - b| <= atol + rtol |b| of finite values; else equal bits.

    Raises:
        QueryError: One of the two is negative, infinite or NaN.
    """

    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            if not (math.isfinite(value) and value >= 0):
                raise QueryError(
                    f"{name} is {value}, expected a finite number, 0 or more",
                    hint="A tolerance that allows everything compares nothing.",
                )


@dataclass(frozen=True)
class FieldDifference:
    """One field of one cohort that differs.

    Args:
        rollout_id, step_id: The cohort; `step_id` is None of a rollout.
        stage: Stage that answers for the field.
        field: Column, or recorded scalar.
        rank: Rank on the left of the sample named, or that recorded the scalar.
        scope, micro_batch_id: What a scalar is of; None of a column.
        samples: Samples compared.
        differing_samples: Of those.
        values: Values compared, of samples of equal length.
        differing_values: Of those.
        max_abs, mean_abs: Over differing values that are finite on both sides; None without any.
        sample_id: The first sample that differs; None of a scalar.
        token: Its first value that differs; None of a scalar column.
        left, right: The two values there.
        layer: The layer of routes, of which a value is the choice of a token; None of all else,
            and of samples of which one side has no routes.
    """

    rollout_id: int
    step_id: int | None
    stage: str
    field: str
    rank: int | None
    scope: str | None
    micro_batch_id: str | None
    samples: int
    differing_samples: int
    values: int
    differing_values: int
    max_abs: float | None
    mean_abs: float | None
    sample_id: str | None
    token: int | None
    left: Any
    right: Any
    layer: int | None = None


class ScalarKey(NamedTuple):
    """What a recorded scalar is of: two sides are compared under one key."""

    stage: str
    field: str
    scope: str | None
    micro_batch_id: str | None
    rank: int


def compare_column(
    cohort: Cohort,
    stage: str,
    column: Column,
    left: pa.Array,
    right: pa.Array,
    rows_of: pa.Table,
    tolerance: Tolerance,
) -> FieldDifference | None:
    """Compare one column of aligned rows; None where nothing differs.

    Args:
        cohort: Whose rows.
        stage: Stage that answers for the column.
        column: Its declaration.
        left: Values of one side.
        right: Values of as many rows of the other, in the same order.
        rows_of: The rows of the left side, which tell `sample_id` and `rank`.
        tolerance: What counts as equal.
    """
    lengths = [_lengths(one) if column.is_list else one.is_valid() for one in (left, right)]
    uneven = pc.not_equal(lengths[0], lengths[1]).to_pylist()
    even = pa.array([not one for one in uneven])
    pair = [one.filter(even) for one in (left, right)]
    rows = [row for row, differs in enumerate(uneven) if not differs]
    if column.is_list:
        parents = pc.list_parent_indices(pair[0]).to_pylist()
        flat = [_plain(one.flatten()) for one in pair]
    else:
        parents = list(range(len(rows)))
        flat = pair
    places = pc.indices_nonzero(_differing(flat[0], flat[1], tolerance)).to_pylist()
    odd = {row for row, differs in enumerate(uneven) if differs}
    odd |= {rows[parents[place]] for place in places}
    if not odd:
        return None
    row = min(odd)
    token = None
    if column.is_list and uneven[row]:
        token = _first_of_uneven(left.slice(row, 1), right.slice(row, 1), tolerance)
    elif column.is_list:
        start = parents.index(rows.index(row))
        token = next(place for place in places if rows[parents[place]] == row) - start
    gaps = _gaps(flat, places)
    return FieldDifference(
        cohort.rollout_id,
        cohort.step_id,
        stage,
        column.name,
        rows_of["rank"][row].as_py(),
        None,
        None,
        len(left),
        len(odd),
        len(flat[0]),
        len(places),
        max(gaps) if gaps else None,
        math.fsum(gaps) / len(gaps) if gaps else None,
        rows_of["sample_id"][row].as_py(),
        token,
        _at(left[row].as_py(), token),
        _at(right[row].as_py(), token),
    )


def compare_scalar(
    cohort: Cohort,
    key: ScalarKey,
    left: float | None,
    right: float | None,
    tolerance: Tolerance,
) -> FieldDifference | None:
    """Compare one recorded scalar; None is that of a side that did not record it."""
    gap = None
    if left is not None and right is not None:
        values = pa.array([left], pa.float64()), pa.array([right], pa.float64())
        if not pc.any(_differing(*values, tolerance)).as_py():
            return None
        gap = next(iter(_gaps(list(values), [0])), None)
    return FieldDifference(
        cohort.rollout_id,
        cohort.step_id,
        key.stage,
        key.field,
        key.rank,
        key.scope,
        key.micro_batch_id,
        samples=0,
        differing_samples=0,
        values=1,
        differing_values=1,
        max_abs=gap,
        mean_abs=gap,
        sample_id=None,
        token=None,
        left=left,
        right=right,
    )


def _plain(values: pa.Array) -> pa.Array:
    """Values that can be held against each other: a struct, such as a span, as its text."""
    if not pa.types.is_struct(values.type):
        return values
    return pa.array([repr(one) for one in values.to_pylist()], pa.string())


def _lengths(values: pa.Array) -> pa.Array:
    """Lengths of lists, -1 of a missing one."""
    return pc.fill_null(pc.list_value_length(values), -1)


def _differing(left: pa.Array, right: pa.Array, tolerance: Tolerance) -> pa.Array:
    """Which values differ: by bits, so that a NaN equals itself, or by more than the tolerance."""
    bits = _BITS.get(left.type)
    if bits is None:
        return pc.fill_null(pc.not_equal(left, right), False)
    unequal = pc.fill_null(pc.not_equal(left.view(bits), right.view(bits)), False)
    if not tolerance.atol and not tolerance.rtol:
        return unequal
    wide = [one.cast(pa.float64()) for one in (left, right)]
    bound = pc.add(tolerance.atol, pc.multiply(tolerance.rtol, pc.abs(wide[1])))
    within = pc.less_equal(pc.abs(pc.subtract(*wide)), bound)
    # The bound of an infinity is infinite itself: it would be equal to everything.
    within = pc.and_(within, pc.and_(*map(pc.is_finite, wide)))
    return pc.and_(unequal, pc.invert(pc.fill_null(within, False)))


def _gaps(flat: list[pa.Array], places: list[int]) -> list[float]:
    if not pa.types.is_primitive(flat[0].type) or pa.types.is_boolean(flat[0].type):
        return []
    chosen = [one.take(pa.array(places, pa.int64())).to_pylist() for one in flat]
    gaps = (abs(float(a) - float(b)) for a, b in zip(*chosen, strict=True) if None not in (a, b))
    return [gap for gap in gaps if math.isfinite(gap)]


def _first_of_uneven(left: pa.Array, right: pa.Array, tolerance: Tolerance) -> int:
    """The first value of two lists of unequal length that differs, or that one lacks."""
    first, second = (_plain(one.flatten()) for one in (left, right))
    common = min(len(first), len(second))
    differing = _differing(first.slice(0, common), second.slice(0, common), tolerance)
    return next(iter(pc.indices_nonzero(differing).to_pylist()), common)


def _at(value: Any, token: int | None) -> Any:
    if token is None or value is None:
        return value
    return value[token] if token < len(value) else None

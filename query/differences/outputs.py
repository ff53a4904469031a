"""Recorded outputs of two sides: scalars under one key, and values of samples by aligned row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pyarrow as pa

from trajreplay.query.differences.align import Alignment
from trajreplay.query.differences.compare import (
    FieldDifference,
    ScalarKey,
    Tolerance,
    compare_column,
    compare_scalar,
)
from trajreplay.query.differences.distributions import distribution
from trajreplay.query.differences.report import Distribution
from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.columns import Column, Table

_SAMPLE = "sample"


@dataclass(frozen=True)
class SampleOutput:
    """Values that the ranks of a cohort recorded for their samples, on both sides.

    Args:
        stage, field: What they are of.
        left, right: One per row of each side, null in rows of a rank that recorded none.
    """

    stage: str
    field: str
    left: pa.Array
    right: pa.Array

    @property
    def column(self) -> Column:
        """It as a column."""
        name = f"{self.stage}.{self.field}"
        return Column(name, pa.float64(), "A recorded value of each sample.", "output")

    @property
    def differs(self) -> bool:
        """Whether any bit does, as long as no row is taken for another."""
        bits = pa.int64()
        return not self.left.view(bits).equals(self.right.view(bits))

    def distribution(self, cohort: Cohort) -> Distribution:
        """What can be said of it where samples have no partners."""
        sides = (pa.table({self.column.name: one}) for one in (self.left, self.right))
        return distribution(cohort, self.column, *sides)


def compare_scalars(
    cohort: Cohort, sets: tuple[CaptureSet, CaptureSet], tolerance: Tolerance
) -> list[FieldDifference]:
    """Compare recorded scalars; one that only one side has differs."""
    left, right = (_scalars(one) for one in sets)
    found = (
        compare_scalar(cohort, key, left.get(key), right.get(key), tolerance)
        for key in dict.fromkeys((*left, *right))
    )
    return [one for one in found if one is not None]


def sample_outputs(sets: tuple[CaptureSet, CaptureSet], table: Table) -> list[SampleOutput]:
    """What either side recorded for its samples, in the order in which its rows are read."""
    names = dict.fromkeys(
        (output.stage, output.field)
        for one in sets
        for entry in one.owners
        for output in entry.outputs
        if output.values is not None
    )
    return [SampleOutput(*name, *(_values(one, table, *name) for one in sets)) for name in names]


def compare_sample_outputs(
    cohort: Cohort,
    outputs: Iterable[SampleOutput],
    alignment: Alignment,
    rows_of: pa.Table,
    tolerance: Tolerance,
) -> list[FieldDifference]:
    """Compare values of aligned samples; `rows_of` as of `compare_column`."""
    left, right = (pa.array(one, pa.int64()) for one in (alignment.left, alignment.right))
    differing = []
    for one in outputs:
        pair = one.left.take(left), one.right.take(right)
        found = compare_column(cohort, one.stage, one.column, *pair, rows_of, tolerance)
        if found is not None:
            differing.append(replace(found, field=one.field, scope=_SAMPLE))
    return differing


def _scalars(one: CaptureSet) -> dict[ScalarKey, float]:
    return {
        ScalarKey(
            output.stage, output.field, output.scope, output.micro_batch_id, entry.key.rank
        ): output.value
        for entry in one.owners
        for output in entry.outputs
        if output.value is not None
    }


def _values(one: CaptureSet, table: Table, stage: str, field: str) -> pa.Array:
    found: list[float | None] = []
    for entry in one.owners:
        file = entry.file(table.name)
        told = (
            output.values
            for output in entry.outputs
            if (output.stage, output.field) == (stage, field) and output.values is not None
        )
        found += next(told, (None,) * (file.rows if file else 0))
    return pa.array(found, pa.float64())

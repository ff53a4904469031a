"""What holding two runs against each other says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from trajreplay.query.differences.compare import FieldDifference
from trajreplay.schema.contracts import STAGE_NAMES

GROWTH = pa.schema(
    [
        pa.field("rollout_id", pa.int64(), nullable=False),
        pa.field("step_id", pa.int64()),
        pa.field("stage", pa.string(), nullable=False),
        pa.field("field", pa.string(), nullable=False),
        pa.field("rank", pa.int64()),
        pa.field("scope", pa.string()),
        pa.field("micro_batch_id", pa.string()),
        pa.field("samples", pa.int64(), nullable=False),
        pa.field("differing_samples", pa.int64(), nullable=False),
        pa.field("values", pa.int64(), nullable=False),
        pa.field("differing_values", pa.int64(), nullable=False),
        pa.field("max_abs", pa.float64()),
        pa.field("mean_abs", pa.float64()),
        pa.field("sample_id", pa.string()),
        pa.field("token", pa.int64()),
        pa.field("left", pa.string()),
        pa.field("right", pa.string()),
        pa.field("layer", pa.int64()),
    ]
)


@dataclass(frozen=True)
class SettingDifference:
    """A setting that differs.

    Args:
        setting: Its dotted path.
        left, right: The two values; None where a side has none.
        rollout_id, step_id: The first cohort in which they differ.
    """

    setting: str
    left: Any
    right: Any
    rollout_id: int
    step_id: int | None


@dataclass(frozen=True)
class Distribution:
    """A field of a cohort whose samples could not be aligned: what can be said without.

    Args:
        rollout_id, step_id: The cohort.
        field: Column.
        count: Values of each side.
        mean, low, high: Of the values of each side that are numbers.
    """

    rollout_id: int
    step_id: int | None
    field: str
    count: tuple[int, int]
    mean: tuple[float | None, float | None]
    low: tuple[float | None, float | None]
    high: tuple[float | None, float | None]

    @property
    def differs(self) -> bool:
        """Whether any of these numbers does."""
        return any(a != b for a, b in (self.count, self.mean, self.low, self.high))


@dataclass
class DiffReport:
    """The outcome.

    Args:
        left, right: What was held against each other.
        cohorts: Cohorts on both sides.
        identical: Of those, that have equal digests throughout.
        by_content: Of those, that were aligned by content.
        only_left, only_right: Cohorts of one side.
        unpaired: Cohorts in which samples have no partner, and how many on each side.
        fields: Every field that differs, in order of cohort, stage and field.
        settings: Settings that differ.
        unaligned: Why samples of a cohort could not be aligned, by cohort.
        distributions: Fields of those cohorts.
        refused: Cohorts that are not whole, and why.
    """

    left: str
    right: str
    cohorts: int = 0
    identical: int = 0
    by_content: int = 0
    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    unpaired: dict[str, tuple[int, int]] = field(default_factory=dict)
    fields: list[FieldDifference] = field(default_factory=list)
    settings: list[SettingDifference] = field(default_factory=list)
    unaligned: dict[str, str] = field(default_factory=dict)
    distributions: list[Distribution] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> FieldDifference | None:
        """The first divergence: by rollout and step, then by stage, then by field."""
        return next(iter(self.fields), None)

    @property
    def verdict(self) -> Literal["same", "different", "refused"]:
        """`different` where anything differs; `refused` where something could not be compared."""
        parts = (
            self.fields,
            self.settings,
            self.only_left,
            self.only_right,
            self.unpaired,
            [one for one in self.distributions if one.differs],
        )
        if any(parts):
            return "different"
        return "refused" if self.refused or self.unaligned or not self.cohorts else "same"

    def arrow(self) -> pa.Table:
        """The fields that differ, a row for each cohort: how the difference grows."""
        rows = [
            vars(one) | {"left": _text(one.left), "right": _text(one.right)} for one in self.fields
        ]
        return pa.Table.from_pylist(rows, schema=GROWTH)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        first = self.first
        return {
            "left": self.left,
            "right": self.right,
            "verdict": self.verdict,
            "first": None if first is None else vars(first),
            "cohorts": self.cohorts,
            "identical": self.identical,
            "by_content": self.by_content,
            "only_left": self.only_left,
            "only_right": self.only_right,
            "unpaired": {name: list(counts) for name, counts in self.unpaired.items()},
            "settings": [vars(one) for one in self.settings],
            "fields": [vars(one) for one in self.fields],
            "unaligned": self.unaligned,
            "distributions": [vars(one) for one in self.distributions],
            "refused": self.refused,
        }


def stage_order(stage: str) -> int:
    """Where a stage stands."""
    return STAGE_NAMES.index(stage) if stage in STAGE_NAMES else len(STAGE_NAMES)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)

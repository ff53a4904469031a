"""Where a NaN or an infinity enters a cohort, and how far it spreads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trajreplay.query import Cohort
from trajreplay.schema.contracts import STAGE_OF_COLUMN
from trajreplay.stages.cohort import LoadedCohort
from trajreplay.stages.not_finite import Samples
from trajreplay.stages.report import json_float

# Columns in the order in which a training makes them.
_ORDER = (
    "raw_reward",
    "reward",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "kl",
    "old_values",
    "token_rewards",
    "advantages",
    "returns",
    "log_probs",
    "entropy",
    "values",
)


@dataclass(frozen=True)
class FirstNonFinite:
    """The earliest value of a cohort that is NaN or infinite.

    Args:
        cohort: The cohort.
        column: The column or scalar that holds it.
        stage: The stage that answers for that.
        value: What it is.
        sample_id: Its sample; None for a scalar over several.
        token: Its position in the response; None for a value a sample.
        masked: Whether it lies under the mask.
        spread: How many values are not finite, by column and scalar, in order.
    """

    cohort: Cohort
    column: str
    stage: str
    value: float
    sample_id: str | None
    token: int | None
    masked: bool
    spread: dict[str, int]

    @property
    def text(self) -> str:
        """The place and the spread in a sentence."""
        where = "" if self.sample_id is None else f" of {self.sample_id}"
        where += "" if self.token is None else f" token {self.token}"
        mask = "" if self.token is None else ", under the mask" if self.masked else ", trained"
        later = ", ".join(f"{name} ({count})" for name, count in self.spread.items())
        return (
            f"{self.stage}: the first value that is not finite is {self.column}{where} "
            f"({json_float(self.value)}{mask}). Not finite are: {later}."
        )

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        facts = {**vars(self), "value": json_float(self.value), "text": self.text}
        return {**self.cohort._asdict(), **{k: v for k, v in facts.items() if k != "cohort"}}


def first_non_finite(cohort: LoadedCohort, place: Cohort) -> FirstNonFinite | None:
    """Look for the earliest NaN or infinity of a cohort, in columns and then in scalars."""
    samples = [Samples(one) for one in (cohort.table, cohort.incomplete) if one is not None]
    first: tuple[str, str, float, str | None, int | None, bool] | None = None
    spread: dict[str, int] = {}
    for name in _ORDER:
        odd = next((found for one in samples if (found := one.not_finite(name))), None)
        if odd is None:
            continue
        spread[name] = odd.count
        stage = STAGE_OF_COLUMN.get(name, "sample")
        first = first or (name, stage, odd.value, odd.sample_id, odd.token, odd.masked)
    for entry in cohort.owners:
        for one in entry.outputs:
            values = [one.value] if one.values is None else list(one.values)
            bad = [value for value in values if value is not None and not np.isfinite(value)]
            if bad:
                spread[one.field] = spread.get(one.field, 0) + len(bad)
                first = first or (one.field, one.stage, bad[0], None, None, False)
    return None if first is None else FirstNonFinite(place, *first, spread)

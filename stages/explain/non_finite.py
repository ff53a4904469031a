"""Where a NaN or an infinity enters a cohort, and how far it spreads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajreplay.query import Cohort
from trajreplay.schema.contracts import STAGE_OF_COLUMN
from trajreplay.schema.tables import SAMPLE_TABLES
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.not_finite import NotFinite, Samples, harmful_columns
from trajreplay.stages.report import json_float

# Columns in the order in which a training makes them; any other comes after these, and scalars of
# a stage after its columns.
_ORDER = (
    "raw_reward",
    "greedy_reward",
    "reward",
    "rollout_log_probs",
    "old_log_probs",
    "sum_pi_squared",
    "ref_log_probs",
    "teacher_log_probs",
    "kl",
    "old_values",
    "last_value",
    "kept_baseline",
    "token_rewards",
    "advantages",
    "returns",
    "log_probs",
    "entropy",
    "values",
    "log_prob_gradients",
)
_Place = tuple[str, str, float, str | None, int | None, bool]
_LAST_OF = {
    "reward.raw": "greedy_reward",
    "reward.post_process": "reward",
    "advantage.kl": "kl",
    "advantage.estimate": "returns",
}


@dataclass(frozen=True)
class FirstNonFinite:
    """The earliest value of a cohort that is NaN or infinite, and may have done harm.

    Args:
        cohort: The cohort.
        column: The column or scalar that holds it.
        stage: The stage that answers for that.
        value: What it is.
        sample_id: Its sample; None for a scalar over several.
        token: Its position in the response; None for a value a sample.
        masked: Whether it lies under the mask.
        spread: How many values are not finite, by column and scalar, in order.
        trained: The first of a sample or a trained token; None where there is none.
        under_mask: The first under the mask; None where there is none.
    """

    cohort: Cohort
    column: str
    stage: str
    value: float
    sample_id: str | None
    token: int | None
    masked: bool
    spread: dict[str, int]
    trained: NotFinite | None = None
    under_mask: NotFinite | None = None

    @property
    def text(self) -> str:
        """The places and the spread in a sentence."""
        where = "" if self.sample_id is None else f" of {self.sample_id}"
        where += "" if self.token is None else f" token {self.token}"
        mask = "" if self.token is None else ", under the mask" if self.masked else ", trained"
        words = [f"{self.column}{where} ({json_float(self.value)}{mask})"]
        others = (("trained", self.trained), ("under the mask", self.under_mask))
        for kind, one in others[::-1] if not self.masked else others[:1]:
            place = None if one is None else (one.column, one.sample_id, one.token)
            if one is not None and place != (self.column, self.sample_id, self.token):
                words.append(
                    f"the first one {kind} {one.column} of {one.where} ({json_float(one.value)})"
                )
                break
        later = ", ".join(f"{name} ({count})" for name, count in self.spread.items())
        return (
            f"{self.stage}: the first value that is not finite is {', '.join(words)}. "
            f"Not finite are: {later}."
        )

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        facts = {**vars(self), "value": json_float(self.value), "text": self.text}
        for name in ("trained", "under_mask"):
            one: NotFinite | None = facts[name]
            facts[name] = None if one is None else {**vars(one), "value": json_float(one.value)}
        return {**self.cohort._asdict(), **{k: v for k, v in facts.items() if k != "cohort"}}


def first_non_finite(cohort: LoadedCohort, place: Cohort) -> FirstNonFinite | None:
    """Look for the earliest NaN or infinity of a cohort: by stage, column, sample and token.

    What a declared stage reads or writes comes before what none does, and what is no part of the
    arithmetic where it is not finite, as a missing reward may be, is left out.
    """
    held = [one for one in (cohort.table, cohort.incomplete) if one is not None]
    samples = [Samples(one) for one in held]
    table = SAMPLE_TABLES["rollout" if place.step_id is None else "step"]
    harmful = harmful_columns(table, cohort.settings)
    used = {name for one in cohort.abilities.values() for name in (*one.reads, *one.writes)}
    names = [one for one in _ORDER if one in harmful]
    names += [one for one in harmful if one not in names]
    by_column = {name: _in(samples, name) for name in names}
    spread = {name: sum(one.count for one in odd) for name, odd in by_column.items() if odd}
    found = sorted(
        (one for odd in by_column.values() for one in odd), key=lambda one: one.column not in used
    )
    masked = [one for one in found if one.masked]
    places: list[tuple[tuple[bool, float], _Place]] = []
    place_of: _Place
    if found:
        lead = found[0]
        stage = STAGE_OF_COLUMN.get(lead.column, "sample")
        place_of = lead.column, stage, lead.value, lead.sample_id, lead.token, lead.masked
        places.append(((lead.column not in used, _turn(lead.column)), place_of))
    for scalar in _scalars(cohort):
        spread[scalar.field] = spread.get(scalar.field, 0) + scalar.values
        place_of = scalar.field, scalar.stage, scalar.value, scalar.sample_id, None, False
        last = _LAST_OF.get(scalar.stage)
        turn = len(_ORDER) + 1.0 if last is None else _turn(last) + 0.5
        places.append(((scalar.stage not in cohort.abilities, turn), place_of))
    if not places:
        return None
    _, first = min(places, key=lambda one: one[0])
    trained = next((one for one in found if not one.masked), None)
    return FirstNonFinite(place, *first, spread, trained, masked[0] if masked else None)


def _turn(column: str) -> float:
    return float(_ORDER.index(column) if column in _ORDER else len(_ORDER))


class _Scalar(NamedTuple):
    """A recorded scalar, or one a sample, that is not finite: how many, and the first."""

    stage: str
    field: str
    values: int
    value: float
    sample_id: str | None


def _scalars(cohort: LoadedCohort) -> Iterator[_Scalar]:
    for entry in cohort.owners:
        for one in entry.outputs:
            values = [one.value] if one.values is None else list(one.values)
            bad = [
                (row, value)
                for row, value in enumerate(values)
                if value is not None and not np.isfinite(value)
            ]
            if bad:
                row, value = bad[0]
                sample_id = (
                    None if one.values is None else _sample_at(cohort.table, entry.key.rank, row)
                )
                yield _Scalar(one.stage, one.field, len(bad), value, sample_id)


def _sample_at(table: pa.Table, rank: int, row: int) -> str | None:
    """The sample of a row of a capture."""
    mine = (table["rank"].to_numpy() == rank) & (table["row"].to_numpy() == row)
    return str(table["sample_id"][int(mine.argmax())].as_py()) if mine.any() else None


def _in(samples: Sequence[Samples], name: str) -> list[NotFinite]:
    """What is not finite in a column: of trained tokens and of those under the mask, in order."""
    found = [
        odd
        for one in samples
        for masked in (True, False)
        if (odd := one.not_finite(name, masked=masked)) is not None
    ]
    return sorted(found, key=lambda one: (one.row, one.token or 0))

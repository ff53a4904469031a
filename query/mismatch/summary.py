"""From the sums of one run to rows of statistics, one a group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trajreplay.query.mismatch.keys import RowKey
from trajreplay.query.mismatch.partial_sums import SEQUENCE_SUMS
from trajreplay.query.mismatch.plan import SumPlan, over
from trajreplay.query.mismatch.statistic import Sums
from trajreplay.query.mismatch.statistics import QUANTILES, STATISTICS
from trajreplay.query.mismatch.sums import SumPlace, TokenSums, taken_together, total
from trajreplay.schema.errors import QueryError

# The columns of a group; `*_from` is the lower end of a bucket whose upper end is twice that.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "run": ("run_id",),
    "rollout": ("rollout_id",),
    "step": ("rollout_id", "step_id"),
    "rank": ("rank",),
    "weight_version": ("weight_version",),
    "position": ("position_from",),
    "length": ("length_from",),
}
GROUPS = tuple(_COLUMNS)


def group_columns(by: Iterable[str]) -> tuple[str, ...]:
    """The columns that tell groups apart; the run is always one.

    Raises:
        QueryError: There is no such group.
    """
    wanted = list(by)
    unknown = [one for one in wanted if one not in _COLUMNS]
    if unknown:
        raise QueryError(f"cannot group by {unknown[0]!r}, expected {', '.join(GROUPS)}")
    found = [column for one in ("run", *wanted) for column in _COLUMNS[one]]
    return tuple(dict.fromkeys(found))


def schema(by: Iterable[str], thresholds: Sequence[float]) -> pa.Schema:
    """The columns of a report's table."""
    keys = [
        pa.field(name, pa.string() if name == "run_id" else pa.int64())
        for name in group_columns(by)
    ]
    fields = [*keys, pa.field("steps", pa.int64())]
    for one in STATISTICS:
        kind = pa.int64() if one.is_count else pa.float64()
        fields += [pa.field(name, kind) for name in one.columns]
    fields += [pa.field(name, pa.float64()) for name in QUANTILES]
    for threshold in thresholds:
        fields.append(pa.field(over(threshold), pa.int64()))
        fields.append(pa.field(f"{over(threshold)}_fraction", pa.float64()))
    return pa.schema(fields)


@dataclass(frozen=True)
class Summary:
    """The statistics of one run.

    Args:
        rows: One a group.
        by_step: Token means of every step, in order, by statistic.
        equal_steps: Steps in which both columns are equal in every token.
        steps: All steps.
    """

    rows: list[dict[str, Any]]
    by_step: dict[str, list[float]]
    equal_steps: list[tuple[str, int, int, int | None]]
    steps: list[tuple[str, int, int, int | None]]


def summarise(sums: TokenSums, keys: Sequence[RowKey], by: Sequence[str], plan: SumPlan) -> Summary:
    """Finish the statistics of one run.

    Args:
        sums: What was taken of its tokens.
        keys: What the samples of each key have in common.
        by: How the tokens are grouped.
        plan: What was taken.
    """
    columns = group_columns(by)
    groups: dict[tuple[Any, ...], list[SumPlace]] = {}
    for place in sorted(sums.parts, key=lambda one: (_order(keys[one.key]), _order(one[1:]))):
        groups.setdefault(_group(keys[place.key], place, columns), []).append(place)
    of_group = {place: index for index, found in enumerate(groups.values()) for place in found}
    quantiles = sums.quantiles(of_group)
    rows = [
        dict(zip(columns, values, strict=True))
        | (found := _row(sums, keys, places, plan))
        | _of_numbers(found, dict(zip(QUANTILES, quantiles[index], strict=True)))
        for index, (values, places) in enumerate(groups.items())
    ]
    steps = _by_step(sums, keys, list(sums.parts), plan)
    ordered = {step: steps[step] for step in sorted(steps, key=_order)}
    return Summary(
        rows,
        _step_values(list(ordered.values()), plan),
        [step for step, found in ordered.items() if found["n"] and found["equal"] == found["n"]],
        list(ordered),
    )


def _of_numbers(row: dict[str, Any], quantiles: dict[str, float]) -> dict[str, float]:
    """The quantiles, which are none where a value is NaN."""
    if math.isnan(row["abs_delta_max"]):
        return dict.fromkeys(quantiles, math.nan)
    return quantiles


def _order(values: Any) -> tuple[Any, ...]:
    found = (*values.step, values.rank, values.length) if isinstance(values, RowKey) else values
    return tuple(
        (one is not None, one) if not isinstance(one, str) else (True, one) for one in found
    )


def _group(key: RowKey, place: SumPlace, columns: Sequence[str]) -> tuple[Any, ...]:
    found = {
        "run_id": key.run_id,
        "rollout_id": key.rollout_id,
        "step_id": key.step_id,
        "rank": key.rank,
        "weight_version": place.version,
        "position_from": place.position,
        "length_from": key.length,
    }
    return tuple(found[name] for name in columns)


def _merged(parts: Sequence[Sums], plan: SumPlan) -> dict[str, float]:
    wanted = [*plan.sums, *(() if plan.by_token else SEQUENCE_SUMS)]
    return {one.name: taken_together(one, [part[one.name] for part in parts]) for one in wanted}


def _by_step(
    sums: TokenSums, keys: Sequence[RowKey], places: Iterable[SumPlace], plan: SumPlan
) -> dict[Any, dict[str, float]]:
    parts: dict[Any, list[Sums]] = {}
    for place in places:
        parts.setdefault(keys[place.key].step, []).extend(sums.parts[place])
    return {step: _merged(found, plan) for step, found in parts.items()}


def _row(
    sums: TokenSums, keys: Sequence[RowKey], places: Sequence[SumPlace], plan: SumPlan
) -> dict[str, Any]:
    steps = _by_step(sums, keys, places, plan)
    everything = _merged([part for place in places for part in sums.parts[place]], plan)
    row: dict[str, Any] = {"steps": len(steps)}
    for one in STATISTICS:
        if one.level == "sequence" and plan.by_token:
            continue  # a part of a sample's tokens is no sequence
        value = one.finish(everything)
        if not one.over_steps:
            row[one.name] = int(value) if one.is_count else value
            continue
        found = [one.finish(step) for step in steps.values()]
        row[one.name] = mean(found)
        row[f"{one.name}_step_min"], row[f"{one.name}_step_max"] = _range(found)
        row[f"{one.name}_token_mean"] = value
    for threshold in plan.thresholds:
        name = over(threshold)
        row[name] = int(everything[name])
        row[f"{name}_fraction"] = everything[name] / everything["n"]
    return row


def _step_values(steps: Sequence[Sums], plan: SumPlan) -> dict[str, list[float]]:
    found = {one.name: [one.finish(step) for step in steps] for one in STATISTICS if one.over_steps}
    for threshold in plan.thresholds:
        name = over(threshold)
        found[f"{name}_fraction"] = [step[name] / step["n"] for step in steps]
    return found


def _range(values: Sequence[float]) -> tuple[float, float]:
    if any(map(math.isnan, values)):
        return math.nan, math.nan
    return min(values), max(values)


def mean(values: Sequence[float]) -> float:
    """The unweighted mean, its sum rounded once."""
    return total(values) / len(values)

"""Two runs side by side: the ratio of their means over steps, with a bootstrap interval."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from trajreplay.query.mismatch.summary import mean

DRAWS = 1000
INTERVAL = (0.025, 0.975)
_SEED = 20261130  # any, but the same each time: a report is the same bytes when it is made again
COMPARISON = pa.schema(
    [
        ("statistic", pa.string()),
        ("base_run", pa.string()),
        ("run_id", pa.string()),
        ("base", pa.float64()),
        ("value", pa.float64()),
        ("ratio", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
    ]
)


def comparison(by_step: Mapping[str, Mapping[str, Sequence[float]]]) -> pa.Table:
    """Every run against the first, by statistic.

    The ratio is that of the unweighted means over steps. Its interval is the 95 % percentile
    interval of 1,000 bootstrap draws, in which the steps of either run are drawn with replacement;
    it is null where a run has fewer than two steps or the base is 0.

    Args:
        by_step: By run and statistic, the token means of its steps.
    """
    base_run, *others = by_step
    rows = [row for run_id in others for row in _rows(base_run, by_step[base_run], run_id, by_step)]
    return pa.Table.from_pylist(rows, schema=COMPARISON)


def _rows(
    base_run: str, base: Mapping[str, Sequence[float]], run_id: str, by_step: Mapping[str, Any]
) -> Iterable[dict[str, Any]]:
    other = by_step[run_id]
    chance = random.Random(_SEED)
    sizes = [len(next(iter(values.values()))) for values in (base, other)]
    draws = (
        [[chance.choices(range(size), k=size) for size in sizes] for _ in range(DRAWS)]
        if min(sizes) > 1
        else []
    )
    for name in base:
        below, above = mean(base[name]), mean(other[name])
        row: dict[str, Any] = {"statistic": name, "base_run": base_run, "run_id": run_id}
        row |= {"base": below, "value": above, "ratio": _ratio(above, below)}
        found = sorted(_drawn(base[name], other[name], draws))
        if found and row["ratio"] is not None:
            row["low"], row["high"] = (_quantile(found, one) for one in INTERVAL)
        yield row


def _drawn(
    base: Sequence[float], other: Sequence[float], draws: Sequence[Sequence[Sequence[int]]]
) -> Iterable[float]:
    for first, second in draws:
        below = sum(map(base.__getitem__, first)) / len(first)
        ratio = _ratio(sum(map(other.__getitem__, second)) / len(second), below)
        if ratio is not None:
            yield ratio


def _ratio(above: float, below: float) -> float | None:
    return above / below if below and math.isfinite(above) and math.isfinite(below) else None


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolated between the two values around it."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

"""Exact quantiles of a large column, of which only what lies around each is sorted.

A sample of blocks says where a quantile is to be looked for. One pass counts what is below and
takes what is within; where a quantile turns out to lie elsewhere, the whole column is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import duckdb
import pyarrow as pa

_WHOLE = 200_000  # fewer values than this are sorted at once
_SAMPLED = 0.02
_DEVIATIONS = 8  # how far around a quantile is looked, in its deviation in a sample of this size


def exact_quantiles(
    connection: duckdb.DuckDBPyConnection, table: str, column: str, wanted: Sequence[float]
) -> list[float]:
    """Quantiles of a column, interpolated linearly between the two values around each.

    Args:
        connection: The database.
        table: A table that is not empty, of rows without order.
        column: A column of it, DOUBLE and never null; NaN is the largest value.
        wanted: From 0 to 1.

    Returns:
        One for each that is wanted, as DuckDB's `quantile_cont` has it, whatever was sampled.
    """
    (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0]
    found = [math.nan] * len(wanted)
    missed = list(range(len(wanted)))
    if count >= _WHOLE:
        brackets = _brackets(connection, table, column, wanted, count)
        below = _below(connection, table, column, [low for low, _ in brackets])
        for place, (low, high) in enumerate(brackets):
            position = wanted[place] * (count - 1)
            first = math.floor(position) - below[place]
            within = f"SELECT {column} FROM {table} WHERE {column} >= ? AND {column} <= ?"
            values = pa.array(connection.execute(within, [low, high]).fetchnumpy()[column])
            last = first + (position > math.floor(position))
            if first >= 0 and last < len(values):
                values = values.sort()
                share = position - math.floor(position)
                found[place] = _between(values[first].as_py(), values[last].as_py(), share)
                missed.remove(place)
    if missed:
        rest = [wanted[place] for place in missed]
        plain = f"SELECT quantile_cont({column}, {rest}) FROM {table}"
        for place, value in zip(missed, connection.execute(plain).fetchall()[0][0], strict=True):
            found[place] = value
    return found


def _brackets(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    column: str,
    wanted: Sequence[float],
    count: int,
) -> list[tuple[float, float]]:
    """Where each quantile is to be looked for; from the largest value of the sample, all above."""
    ends = []
    for one in wanted:
        spread = _DEVIATIONS * math.sqrt(one * (1 - one) / (_SAMPLED * count))
        ends += [max(0.0, one - spread), min(1.0, one + spread)]
    sample = f"SELECT {column} FROM {table} USING SAMPLE {100 * _SAMPLED} PERCENT (system)"
    taken = f"SELECT quantile_disc({column}, {ends}) FROM ({sample})"
    values = connection.execute(taken).fetchall()[0][0]
    if values is None:  # the sample is empty
        return [(math.nan, math.nan)] * len(wanted)
    above = [math.nan if end == 1 else value for end, value in zip(ends, values, strict=True)]
    return list(zip(values[::2], above[1::2], strict=True))


def _below(
    connection: duckdb.DuckDBPyConnection, table: str, column: str, bounds: Sequence[float]
) -> Sequence[int]:
    counts = ", ".join(f"count_if({column} < ?)" for _ in bounds)
    found: Sequence[int] = connection.execute(
        f"SELECT {counts} FROM {table}", list(bounds)
    ).fetchall()[0]
    return found


def _between(first: float, last: float, share: float) -> float:
    return first if first == last or not share else first + (last - first) * share

"""Exact quantiles of a large column, of which only what lies around each is sorted.

A sample of blocks says where a quantile is to be looked for. One pass counts what is below and
takes what is within; where a quantile turns out to lie elsewhere, the whole column is sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import duckdb


_WHOLE = 200_000  # fewer values than this are sorted at once
_SAMPLED = 0.02
_UPPER = 0.9  # what lies above is so little that all of it is taken
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
    if count < _WHOLE:
        return _of_whole(connection, table, column, wanted)
    found: dict[float, float] = {}
    for span in _spans(connection, table, column, wanted, count):
        values, below = _within(connection, table, column, span, count)
        for one in span.wanted:
            position = one * (count - 1)
            share = position - math.floor(position)
            first = math.floor(position) - below
            last = first + (share > 0)
            if first >= 0 and last < len(values):
                found[one] = _between(float(values[first]), float(values[last]), share)
    missed = [one for one in wanted if one not in found]
    if missed:
        found |= zip(missed, _of_whole(connection, table, column, missed), strict=True)
    return [found[one] for one in wanted]


class _Span(NamedTuple):
    """Where some quantiles are to be looked for; the last span has no upper end."""

    low: float
    high: float | None
    wanted: tuple[float, ...]


def _of_whole(
    connection: duckdb.DuckDBPyConnection, table: str, column: str, wanted: Sequence[float]
) -> list[float]:
    plain = f"SELECT quantile_cont({column}, {list(wanted)}) FROM {table}"
    found: list[float] = connection.execute(plain).fetchall()[0][0]
    return found


def _within(
    connection: duckdb.DuckDBPyConnection, table: str, column: str, span: _Span, count: int
) -> tuple[Any, int]:
    """The values of a span, sorted, and how many are below it."""
    taken = f"SELECT {column} FROM {table} WHERE {column} >= ?"
    if span.high is None:
        values = connection.execute(taken, [span.low]).fetchnumpy()[column]
        values.sort()
        return values, count - len(values)
    taken += f" AND {column} <= ?"
    values = connection.execute(taken, [span.low, span.high]).fetchnumpy()[column]
    less = f"SELECT count_if({column} < ?) FROM {table}"
    (below,) = connection.execute(less, [span.low]).fetchall()[0]
    values.sort()
    return values, below


def _spans(
    connection: duckdb.DuckDBPyConnection,
    table: str,
    column: str,
    wanted: Sequence[float],
    count: int,
) -> list[_Span]:
    """A span around each quantile of the lower part, and one from the lowest upper one on."""
    ends = []
    for one in wanted:
        spread = _DEVIATIONS * math.sqrt(one * (1 - one) / (_SAMPLED * count))
        ends += [max(0.0, one - spread), min(1.0, one + spread)]
    sample = f"SELECT {column} FROM {table} USING SAMPLE {100 * _SAMPLED} PERCENT (system)"
    taken = f"SELECT quantile_disc({column}, {ends}) FROM ({sample})"
    values = connection.execute(taken).fetchall()[0][0]
    if values is None:  # the sample is empty
        return []
    found = []
    upper = [place for place, one in enumerate(wanted) if one >= _UPPER]
    if upper:
        low = min((values[2 * place] for place in upper), key=_largest_nan)
        found.append(_Span(low, None, tuple(wanted[place] for place in upper)))
    return found + [
        _Span(values[2 * place], values[2 * place + 1], (one,))
        for place, one in enumerate(wanted)
        if one < _UPPER
    ]


def _largest_nan(value: float) -> tuple[bool, float]:
    return math.isnan(value), value


def _between(first: float, last: float, share: float) -> float:
    return first if first == last or not share else first + (last - first) * share

"""Sums over the tokens of each sample, and exact quantiles, taken by DuckDB from streamed pieces.

Token sums of one sample are taken in the order of its tokens, whatever the number of threads: a
piece holds so few samples that DuckDB's table of groups is never split. Over samples the sums are
exact until they are rounded once (`math.fsum`), in pieces whose bounds depend on the data alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from trajreplay.query.mismatch.partial_sums import (
    LOG_RATIO_LIMIT,
    NEAR,
    POWERS,
    SEQUENCE_SUMS,
    TOKEN_SUMS,
    PartialSum,
)
from trajreplay.query.mismatch.quantiles import exact_quantiles
from trajreplay.query.mismatch.statistics import QUANTILES

Run = Callable[[Callable[[], Any]], Any]

# The response tokens of a piece, one row each. {where} of a token are its position and version.
_FLAT = """
SELECT row, key, version, unnest(trainer)::DOUBLE AS x, unnest(sampler)::DOUBLE AS r,
       unnest(mask) AS m{extra}
FROM piece"""
_POSITION = ", unnest(range(len(mask))) AS i"
# A sampled token's weights are those of the span that it lies in; unknown outside of all spans.
_VERSION = """, unnest(CASE
    WHEN spans IS NULL THEN list_resize([]::BIGINT[], len(mask))
    WHEN len(spans) = 1 AND spans[1].start = 0 AND spans[1].stop >= len(mask)
      THEN list_resize([spans[1].version], len(mask), spans[1].version)
    ELSE list_transform(range(len(mask)), lambda i: list_filter(
      spans, lambda span: span.start <= i AND i < span.stop)[1].version)
  END) AS used"""
# What is reckoned of every far token; not the others, so that exp is taken of few.
_FAR = """
SELECT *, e - 1 - d AS k3, i - 1 + d AS reverse,
       CASE WHEN a <= {limit} THEN e ELSE exp(least(greatest(d, -{limit}), {limit})) END AS v
FROM (SELECT *, exp(d) AS e, exp(-d) AS i FROM ({valid}) WHERE NOT a <= {near})"""


class Place(NamedTuple):
    """Where a partial sum counts: the key of a capture's samples, and what its tokens share."""

    key: int
    position: int | None = None
    version: int | None = None


@dataclass(frozen=True)
class SumPlan:
    """What is taken of each token.

    Args:
        thresholds: |d| beyond which tokens are counted.
        cap: Where importance ratios are truncated.
        by_key: Whether samples of several captures, or lengths, are told apart.
        by_position: Whether positions are told apart, in powers of two.
        by_version: Whether the weights that sampled a token are told apart.
        any_version: Whether tokens count that other weights sampled than recomputed them.
    """

    thresholds: tuple[float, ...] = (0.5, 1.0)
    cap: float = 2.0
    by_key: bool = False
    by_position: bool = False
    by_version: bool = False
    any_version: bool = False

    @property
    def by_token(self) -> bool:
        """Whether the tokens of one sample count in different places."""
        return self.by_position or self.by_version

    @property
    def places(self) -> str:
        """What the tokens of a piece are grouped by, in SQL."""
        return "row, position, version" if self.by_token else "row"

    @property
    def delta_columns(self) -> tuple[str, ...]:
        """What is kept of each difference beside its size."""
        return (*(("key",) if self.by_key else ()), *(("position", "version") * self.by_token))

    @property
    def sums(self) -> tuple[PartialSum, ...]:
        """All token sums."""
        plain = tuple(replace(one, sql=one.sql.format(cap=repr(self.cap))) for one in TOKEN_SUMS)
        counts = (PartialSum(over(one), f"a > {one!r}", "count") for one in self.thresholds)
        return (*plain, *counts)

    def tokens(self, *, versioned: bool) -> str:
        """The valid tokens of a piece in SQL: row, key, position, version, x, d."""
        extra = (_POSITION if self.by_position else "") + (_VERSION if versioned else "")
        position = (
            "CASE WHEN i < 256 THEN 0 ELSE 1 << floor(log2(i))::INT END"
            if self.by_position
            else "NULL"
        )
        version = "used" if versioned and self.by_version else "NULL"
        same = "" if self.any_version or not versioned else _SAME_VERSION
        return (
            f"SELECT row, key, {position} AS position, {version} AS version, x, x - r AS d "
            f"FROM ({_FLAT.format(extra=extra)}) WHERE m <> 0{same}"
        )

    @property
    def near(self) -> float:
        """The difference up to which tokens are near: beyond no threshold and not truncated."""
        return min(NEAR, math.log(self.cap), *self.thresholds)

    def statement(self, *, versioned: bool) -> str:
        """One row a sample, or where tokens are told apart one a sample and place."""
        valid = f"SELECT *, abs(d) AS a, d * d AS h FROM ({self.tokens(versioned=versioned)})"
        places = self.places
        powers = ", ".join(f"{sql} AS {name}" for name, sql in POWERS.items())
        near = ", ".join(f"{one.near} AS {one.name}" for one in self.sums)
        far = _FAR.format(limit=repr(LOG_RATIO_LIMIT), valid=valid, near=repr(self.near))
        found = (
            f"SELECT {places}, {near} FROM (SELECT {places}, {powers} FROM ({valid}) "
            f"WHERE a <= {self.near!r} GROUP BY {places}) UNION ALL SELECT {places}, "
            f"{', '.join(one.aggregate for one in self.sums)} FROM ({far}) GROUP BY {places}"
        )
        joined = ", ".join(one.joined for one in self.sums)
        found = f"SELECT {places}, {joined} FROM ({found}) GROUP BY {places}"
        if self.by_token:
            return f"{found} ORDER BY ALL"
        sequence = ", ".join(f"{one.sql} AS {one.name}_of" for one in SEQUENCE_SUMS)
        return f"SELECT *, {sequence} FROM ({found}) ORDER BY row"

    def differences(self, *, versioned: bool) -> str:
        """The sizes of the differences of a piece, and where they count."""
        columns = ", ".join((*self.delta_columns, "abs(d) AS a"))
        return f"SELECT {columns} FROM ({self.tokens(versioned=versioned)})"


_SAME_VERSION = " AND (version IS NULL OR used IS NULL OR used = version)"


def over(threshold: float) -> str:
    """The name of the count of tokens beyond a threshold.

    >>> over(0.5), over(2)
    ('over_0_5', 'over_2_0')
    """
    return "over_" + repr(float(threshold)).replace(".", "_").replace("-", "_").replace("+", "")


@dataclass
class TokenSums:
    """Takes pieces and keeps what the statistics of one run are finished from.

    Args:
        connection: An empty database, which may spill.
        run: How its work is run.
        plan: What is taken.
    """

    connection: duckdb.DuckDBPyConnection
    run: Run
    plan: SumPlan
    parts: dict[Place, list[dict[str, float]]] = field(default_factory=dict)
    of_other_version: int = 0

    def __post_init__(self) -> None:
        kept = "".join(f"{name} BIGINT, " for name in self.plan.delta_columns)
        made = f"CREATE OR REPLACE TEMP TABLE deltas ({kept}a DOUBLE)"
        self.run(lambda: self.connection.execute(made).fetchall())

    def add(self, piece: pa.Table) -> None:
        """Take the sums of one piece and keep its differences."""
        spans = piece["spans"].null_count < len(piece)
        known = piece["version"].null_count < len(piece)
        versioned = spans and (self.plan.by_version or (known and not self.plan.any_version))
        statement = self.plan.statement(versioned=versioned)
        kept = f"INSERT INTO deltas {self.plan.differences(versioned=versioned)}"

        def work() -> dict[str, list[Any]]:
            self.connection.register("piece", piece)
            arrays = self.connection.execute(statement).fetchnumpy()
            found = {name: values.tolist() for name, values in arrays.items()}
            self.connection.execute(kept).fetchall()
            if versioned and not self.plan.any_version:
                valid = self.connection.execute("SELECT sum(list_sum(mask)) FROM piece")
                self.of_other_version += int(valid.fetchall()[0][0] or 0)
            return found

        found = self.run(work)
        if versioned and not self.plan.any_version:
            self.of_other_version -= int(sum(found["n"]))
        self._keep(piece["key"].to_pylist(), found)

    def _keep(self, keys: Sequence[int], columns: Mapping[str, list[Any]]) -> None:
        rows: dict[Place, list[int]] = {}
        unsplit = [None] * len(columns["row"])
        split = [columns.get(name, unsplit) for name in ("position", "version")]
        for row, (sample, *place) in enumerate(zip(columns["row"], *split, strict=True)):
            rows.setdefault(Place(keys[sample], *place), []).append(row)
        sums = [(one.name, one) for one in self.plan.sums]
        if not self.plan.by_token:
            sums += [(f"{one.name}_of", one) for one in SEQUENCE_SUMS]
        for where, chosen in rows.items():
            taken = {
                one.name: taken_together(one, list(map(columns[name].__getitem__, chosen)))
                for name, one in sums
            }
            self.parts.setdefault(where, []).append(taken)

    def quantiles(self, group_of: dict[Place, int]) -> dict[int, list[float]]:
        """Exact quantiles of |d|, interpolated between the two values around them, by group.

        Args:
            group_of: The group of every place.
        """
        wanted = list(QUANTILES.values())
        one_group = len(set(group_of.values())) == 1
        groups = pa.table(
            {
                "key": pa.array([one.key for one in group_of], pa.int32()),
                "position": pa.array([one.position for one in group_of], pa.int64()),
                "version": pa.array([one.version for one in group_of], pa.int64()),
                "g": pa.array(list(group_of.values()), pa.int32()),
            }
        )
        same = " AND ".join(
            f"deltas.{name} IS NOT DISTINCT FROM groups.{name}" for name in self.plan.delta_columns
        )

        def work() -> list[Any]:
            if one_group:
                found = exact_quantiles(self.connection, "deltas", "a", wanted)
                return [(next(iter(group_of.values())), found)]
            self.connection.register("groups", groups)
            return self.connection.execute(
                f"SELECT g, quantile_cont(a, {wanted}) FROM deltas JOIN groups ON {same} GROUP BY g"
            ).fetchall()

        return dict(self.run(work)) if group_of else {}


def taken_together(one: PartialSum, values: Sequence[float]) -> float:
    """Partial results of a sum, count, smallest or largest made one."""
    if one.taken == "smallest":
        return min(values)
    if one.taken == "largest":
        return math.nan if any(map(math.isnan, values)) else max(values)
    return total(values)


def total(values: Iterable[float]) -> float:
    """The sum, exact until it is rounded once; not finite where a value is not.

    >>> total([1e16, 1.0, -1e16])
    1.0
    """
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond the largest float, or of both infinities
        return sum(values)

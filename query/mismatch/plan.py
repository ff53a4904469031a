"""What is taken of each token of a piece, and the statement that puts it together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trajreplay.query.mismatch.partial_sums import (
    LOG_RATIO_LIMIT,
    SEQUENCE_SUMS,
    TOKEN_SUMS,
    PartialSum,
)

NEAR = 0.125  # up to here the series of `near_powers` is taken
# What is reckoned of every far token; not of the others, so that exp is taken of few.
# DuckDB has NaN above every number.
_FAR = """
SELECT *, CASE WHEN d = 'inf' THEN d ELSE e - 1 - d END AS k3,
       CASE WHEN d = '-inf' THEN -d ELSE i - 1 + d END AS reverse,
       CASE WHEN a <= {limit} OR isnan(d) THEN e
            WHEN d > 0 THEN exp({limit}) ELSE exp(-{limit}) END AS v
FROM (SELECT *, abs(d) AS a, exp(d) AS e, exp(-d) AS i FROM ({tokens}))"""


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
        counts = (
            PartialSum(over(one), f"NOT isnan(a) AND a > {one!r}", "count")
            for one in self.thresholds
        )
        return (*plain, *counts)

    @property
    def near(self) -> float:
        """The difference up to which tokens are near: beyond no threshold and not truncated."""
        return min(NEAR, math.log(self.cap), *self.thresholds)

    def statement(self, *, far: bool) -> str:
        """One row a sample; where tokens are told apart, rows whose sums are still parts of them.

        Args:
            far: Whether there are `far` tokens, in lists by sample, beside the powers of those
                that are `near`.
        """
        places = self.places
        series = ", ".join(f"{one.near} AS {one.name}" for one in self.sums)
        found = f"SELECT {places}, {series} FROM near"
        if far:
            sums = ", ".join(one.aggregate for one in self.sums)
            lists = ("position", "version", "x", "d") if self.by_token else ("x", "d")
            unnested = ", ".join(f"unnest({name}) AS {name}" for name in lists)
            tokens = _FAR.format(
                limit=repr(LOG_RATIO_LIMIT), tokens=f"SELECT row, {unnested} FROM far"
            )
            found = f"{found} UNION ALL SELECT {places}, {sums} FROM ({tokens}) GROUP BY {places}"
        if self.by_token:
            return f"{found} ORDER BY ALL"
        if far:
            joined = ", ".join(one.joined for one in self.sums)
            found = f"SELECT {places}, {joined} FROM ({found}) GROUP BY {places}"
        sequence = ", ".join(f"{one.sql} AS {one.name}_of" for one in SEQUENCE_SUMS)
        return f"SELECT *, {sequence} FROM ({found}) ORDER BY row"


def over(threshold: float) -> str:
    """The name of the count of tokens beyond a threshold.

    >>> over(0.5), over(2)
    ('over_0_5', 'over_2_0')
    """
    return "over_" + repr(float(threshold)).replace(".", "_").replace("-", "_").replace("+", "")

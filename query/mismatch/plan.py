"""What is taken of each token of a piece, as statements of DuckDB."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trajreplay.query.mismatch.partial_sums import (
    LOG_RATIO_LIMIT,
    NEAR,
    POWERS,
    SEQUENCE_SUMS,
    TOKEN_SUMS,
    PartialSum,
)

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
# What is reckoned of every far token; not of the others, so that exp is taken of few.
_FAR = """
SELECT *, e - 1 - d AS k3, i - 1 + d AS reverse,
       CASE WHEN a <= {limit} THEN e WHEN d > 0 THEN exp({limit}) ELSE exp(-{limit}) END AS v
FROM (SELECT *, abs(d) AS a, exp(d) AS e, exp(-d) AS i FROM ({tokens}))"""
_SAME_VERSION = " AND (version IS NULL OR used IS NULL OR used = version)"


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

    def near_powers(self, *, versioned: bool) -> str:
        """Powers of the near tokens of a piece, summed by sample or by sample and place."""
        powers = ", ".join(f"{sql} AS {name}" for name, sql in POWERS.items())
        return (
            f"SELECT {self.places}, {powers} FROM (SELECT *, abs(d) AS a, d * d AS h "
            f"FROM ({self.tokens(versioned=versioned)})) WHERE a <= {self.near!r} "
            f"GROUP BY {self.places}"
        )

    def far_tokens(self, *, versioned: bool) -> str:
        """The valid tokens of a piece that are not near; also those whose d is no number."""
        return (
            f"SELECT {self.places}, x, d FROM ({self.tokens(versioned=versioned)}) "
            f"WHERE NOT (abs(d) <= {self.near!r})"
        )

    def statement(self, *, far: bool) -> str:
        """One row a sample, or where tokens are told apart one a sample and place.

        Args:
            far: Whether there are `far` tokens, in lists by sample, beside the powers of those that
                are `near`.
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
            joined = ", ".join(one.joined for one in self.sums)
            found = f"{found} UNION ALL SELECT {places}, {sums} FROM ({tokens}) GROUP BY {places}"
            found = f"SELECT {places}, {joined} FROM ({found}) GROUP BY {places}"
        if self.by_token:
            return f"{found} ORDER BY ALL"
        sequence = ", ".join(f"{one.sql} AS {one.name}_of" for one in SEQUENCE_SUMS)
        return f"SELECT *, {sequence} FROM ({found}) ORDER BY row"

    def differences(self, *, versioned: bool) -> str:
        """The sizes of the differences of a piece, and where they count."""
        columns = ", ".join((*self.delta_columns, "abs(d) AS a"))
        return f"SELECT {columns} FROM ({self.tokens(versioned=versioned)})"


def over(threshold: float) -> str:
    """The name of the count of tokens beyond a threshold.

    >>> over(0.5), over(2)
    ('over_0_5', 'over_2_0')
    """
    return "over_" + repr(float(threshold)).replace(".", "_").replace("-", "_").replace("+", "")

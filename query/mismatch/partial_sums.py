"""What is taken over the tokens of a sample, and over sequences, declared once.

`d` is the difference of a token, trainer minus sampler. Tokens of a small one are near: of them
only powers of `d` are summed, from which each sum is a series.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Taken = Literal["sum", "count", "smallest", "largest"]
LOG_RATIO_LIMIT = 20.0  # verl and slime clamp a log-ratio to it before they square its exponential
# DuckDB has NaN above every number: what is smallest is NaN, too, where a value is.
_AGGREGATES = {
    "sum": "sum({})",
    "count": "count_if({})",
    "smallest": "-max(-({}))",
    "largest": "max({})",
}


@dataclass(frozen=True)
class PartialSum:
    """What DuckDB takes over the tokens of a sample, or over sequences.

    Args:
        name: Its name.
        sql: The expression that is taken; over far tokens of `d`, `a` = |d|, `e` = exp(d), `i` =
            exp(-d), `v` = e with |d| at most 20, `k3`, `reverse` = k3 of -d, `x` = the trainer's
            log-prob.
        taken: Whether the values are summed, those that hold counted, or the smallest or largest
            is kept.
        near: What near tokens add, from their powers.
    """

    name: str
    sql: str
    taken: Taken = "sum"
    near: str = "0"

    @property
    def aggregate(self) -> str:
        """The aggregate in SQL."""
        return f"{_AGGREGATES[self.taken].format(self.sql)} AS {self.name}"

    @property
    def joined(self) -> str:
        """The aggregate in SQL over what near and far tokens add."""
        taken = "sum" if self.taken == "count" else self.taken
        return f"{_AGGREGATES[taken].format(self.name)} AS {self.name}"


_EVEN = "(h1 / 2 + h2 / 24 + h3 / 720 + h4 / 40320 + h5 / 3628800)"  # cosh(d) - 1
_ODD = "(d3 / 6 + d5 / 120 + d7 / 5040 + d9 / 362880)"  # sinh(d) - d
_SQUARED = (  # exp(2 d) - 1
    "(2 * d1 + 2 * h1 + 8 * d3 / 6 + 16 * h2 / 24 + 32 * d5 / 120 + 64 * h3 / 720 "
    "+ 128 * d7 / 5040 + 256 * h4 / 40320 + 512 * d9 / 362880 + 1024 * h5 / 3628800)"
)
_ABOVE_ONE = f"(d1 + {_EVEN} + {_ODD})"  # exp(d) - 1
_WEIGHT = f"(n + {_ABOVE_ONE})"
_BOXED = (
    "CASE WHEN isnan(e) THEN e WHEN e > {cap} THEN {cap} WHEN e < 1 / {cap} THEN 1 / {cap} "
    "ELSE e END"
)
TOKEN_SUMS = (
    PartialSum("n", "true", "count", "n"),
    PartialSum("d", "d", near="d1"),
    PartialSum("a", "a", near="a1"),
    PartialSum("dd", "d * d", near="h1"),
    PartialSum("k3", "k3", near=f"{_EVEN} + {_ODD}"),
    PartialSum("reverse", "reverse", near=f"{_EVEN} - {_ODD}"),
    PartialSum(
        "worse", "CASE WHEN d > 0 THEN k3 ELSE reverse END", near=f"{_EVEN} + odd_abs"
    ),  # k3 of |d|
    PartialSum(
        "js",
        "a / 2 + ln(1 + CASE WHEN d > 0 THEN i ELSE e END) - ln(2)",
        # log(cosh(d / 2))
        near="h1 / 8 - h2 / 192 + h3 / 2880 - h4 * 17 / 645120 + h5 * 31 / 14515200",
    ),
    PartialSum("w", "e", near=_WEIGHT),
    PartialSum("v", "v", near=_WEIGHT),
    PartialSum("v1", "v - 1", near=_ABOVE_ONE),
    PartialSum("vv", "v * v - 1", near=_SQUARED),
    PartialSum("v2", "v * v", near=f"n + {_SQUARED}"),
    PartialSum("w_cut", "CASE WHEN NOT isnan(e) AND e > {cap} THEN {cap} ELSE e END", near=_WEIGHT),
    PartialSum("w_high", "NOT isnan(e) AND e > {cap}", "count"),
    PartialSum("w_box", _BOXED, near=_WEIGHT),
    PartialSum("w_box2", f"{_BOXED} * {_BOXED}", near=f"n + {_SQUARED}"),
    PartialSum("x", "x", near="x"),
    PartialSum("equal", "d = 0", "count", "equal"),
    PartialSum("odd", "not isfinite(d)", "count"),
    PartialSum("d_low", "d", "smallest", "low"),
    PartialSum("d_high", "d", "largest", "high"),
    PartialSum("a_high", "a", "largest", "greatest(-low, high) + 0.0"),
)
# Over the samples that have a valid token, of the sums above.
SEQUENCE_SUMS = (
    PartialSum("sequences", "true", "count"),
    PartialSum("ppl_x", "exp(-x / n)"),
    PartialSum("ppl_r", "exp(-(x - d) / n)"),
    PartialSum("lp", "-d / n"),
    PartialSum("lp_abs", "abs(d) / n"),
    PartialSum("lp_low", "-d / n", "smallest"),
    PartialSum("lp_high", "-d / n", "largest"),
    PartialSum("ppl_ratio", "exp(-d / n)"),
    PartialSum("s", "exp(d)"),
    PartialSum("s_low", "exp(d)", "smallest"),
    PartialSum("s_high", "exp(d)", "largest"),
    PartialSum("s2", f"exp(2 * least(greatest(d, -{LOG_RATIO_LIMIT}), {LOG_RATIO_LIMIT}))"),
    PartialSum("chi", "vv / n"),
    PartialSum("error", "(n + a + worse) / n"),
    PartialSum("error_low", "(n + a + worse) / n", "smallest"),
    PartialSum("error_high", "(n + a + worse) / n", "largest"),
)

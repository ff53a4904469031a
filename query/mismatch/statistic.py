"""One statistic of a mismatch, and how it is finished from the sums that DuckDB takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Sums = Mapping[str, float]


@dataclass(frozen=True)
class Statistic:
    """One declared statistic.

    Args:
        name: Its column.
        formula: What it is.
        origin: Who computes it under which name.
        finish: From sums to the statistic.
        over_steps: Whether it is taken for each step, and the column is the unweighted mean over
            steps, beside which `_step_min` and `_step_max` over steps and the token-weighted mean
            `_token_mean` stand.
        level: What it is over: tokens, or whole sequences.
        is_count: Whether it is a whole number.
    """

    name: str
    formula: str
    origin: str
    finish: Callable[[Sums], float]
    over_steps: bool = False
    level: Literal["token", "sequence"] = "token"
    is_count: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it makes."""
        beside = ("_step_min", "_step_max", "_token_mean") if self.over_steps else ()
        return tuple(self.name + ending for ending in ("", *beside))


def mean_of(name: str, *, over: str = "n", plus: float = 0.0) -> Callable[[Sums], float]:
    """A sum over a count, plus a constant."""
    return lambda sums: ratio(sums[name], sums[over]) + plus


def value_of(name: str) -> Callable[[Sums], float]:
    """A sum, count, smallest or largest as it is."""
    return lambda sums: sums[name]


def exp(value: float) -> float:
    """The exponential; infinite beyond the largest float."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def ratio(above: float, below: float) -> float:
    """A quotient; NaN over nothing."""
    return above / below if below else math.nan


def effective(sums: Sums, first: float, second: float) -> float:
    """The effective share of the tokens, from the sums of weights and of their squares."""
    return ratio(first * first, sums["n"] * second)


def spread(sums: Sums) -> float:
    """The deviation of the importance ratio, divisor n; about 1, near which it mostly is."""
    mean = ratio(sums["v1"], sums["n"])
    return math.sqrt(max(0.0, ratio(sums["vv"] - 2 * sums["v1"], sums["n"]) - mean * mean))

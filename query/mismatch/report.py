"""What a mismatch measurement says: rows of statistics, runs compared, findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trajreplay.query.mismatch.pair import Severity
from trajreplay.query.mismatch.plan import over
from trajreplay.query.mismatch.statistics import QUANTILES, STATISTICS


@dataclass(frozen=True)
class MismatchFinding:
    """One thing worth saying about the compared columns of a run.

    Args:
        severity: `error` where the statistics do not mean what they say, `warning`, `info`.
        run_id: The run.
        message: What was found.
    """

    severity: Severity
    run_id: str
    message: str


@dataclass(frozen=True)
class MismatchReport:
    """Train-versus-rollout statistics of runs.

    Args:
        pair: The columns compared and where they came from, in words.
        levels: By run, whether its steps or its rollouts were read.
        table: One row a group: the group's columns, `steps`, and every statistic.
        comparison: Every run against the first; empty for one run.
        by_step: By run and statistic, the token means of its steps in order.
        steps: By run, its steps (run, attempt, rollout, step) in order.
        without: By run and step, how many samples with a valid token lack one of the columns.
        of_other_version: By run and step, how many valid tokens are left out since other weights
            sampled them than recomputed them.
        interpolated: By run, the columns that some captures hold interpolated, not recomputed.
        unproven: By run, what may tell the columns apart and is stated of one of them alone.
        findings: What is to be said of the columns.
        thresholds: |d| beyond which tokens were counted.
    """

    pair: str
    levels: Mapping[str, str]
    table: pa.Table
    comparison: pa.Table
    by_step: Mapping[str, Mapping[str, Sequence[float]]]
    steps: Mapping[str, Sequence[tuple[str, int, int, int | None]]]
    without: Mapping[str, Mapping[tuple[str, int, int, int | None], int]]
    of_other_version: Mapping[str, Mapping[tuple[str, int, int, int | None], int]]
    interpolated: Mapping[str, tuple[str, ...]]
    unproven: Mapping[str, tuple[str, ...]]
    findings: tuple[MismatchFinding, ...]
    thresholds: tuple[float, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no finding of severity error."""
        return not any(one.severity == "error" for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Everything but the steps' own values, as plain data."""
        return {
            "pair": self.pair,
            "levels": dict(self.levels),
            "rows": self.table.to_pylist(),
            "comparison": self.comparison.to_pylist(),
            "findings": [vars(one) for one in self.findings],
        }


def statistic_rows(thresholds: Sequence[float] = (0.5, 1.0)) -> list[dict[str, str]]:
    """Every statistic with formula and origin, as rows of a document.

    >>> statistic_rows()[0]["statistic"]
    'generation_kl'
    """
    rows = [
        {"statistic": one.name, "formula": one.formula, "origin": one.origin, "level": one.level}
        for one in STATISTICS
    ]
    rows += [
        {
            "statistic": name,
            "formula": f"quantile {share} of |d|, interpolated",
            "origin": "",
            "level": "token",
        }
        for name, share in QUANTILES.items()
    ]
    for one in thresholds:
        rows.append(
            {
                "statistic": over(one),
                "formula": f"tokens with |d| > {one}; over valid tokens as {over(one)}_fraction",
                "origin": "",
                "level": "token",
            }
        )
    return rows

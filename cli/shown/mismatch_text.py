"""A mismatch report as text: runs side by side, or a row a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.cli.terminal.text import aligned, printable

if TYPE_CHECKING:
    from trajreplay.query import MismatchReport

_DIGITS = 6
_FEWEST_DIGITS = 3
# Of a group's row, what a terminal shows unless everything is asked for.
_MAIN = ("valid_tokens", "generation_kl", "abs_delta", "abs_delta_p99", "abs_delta_max")


def significant(value: float | None) -> str:
    """A number with six significant digits, zeros at its end left out down to three digits.

    >>> significant(0.0025), significant(0.00038760), significant(37.72570140659809)
    ('0.00250', '0.0003876', '37.7257')
    """
    if value is None:
        return "-"
    if value != value or value in (float("inf"), float("-inf")):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    for digits in range(_FEWEST_DIGITS, _DIGITS):
        if float(f"{value:.{digits}g}") == float(f"{value:.{_DIGITS}g}"):
            return f"{value:#.{digits}g}".rstrip(".")
    return f"{value:#.{_DIGITS}g}".rstrip(".")


def share(count: int, of: int) -> str:
    """A count with its share in percent.

    >>> share(7873, 3858221), share(3, 3), share(0, 1291712)
    ('7,873 (0.204 %)', '3 (100 %)', '0')
    """
    percent = f"{count / of * 100:#.3g}".rstrip(".") if count else ""
    return f"{count:,} ({percent} %)" if count else "0"


def run_text(report: MismatchReport, *, everything: bool) -> str:
    """One column a run, one row a measurement; then the ratios, then what is to be said."""
    rows = report.table.to_pylist()
    names = [printable(row["run_id"]) for row in rows]
    lines = list(_main_lines(report, rows))
    if everything:
        lines += _all_lines(report, rows)
    text = aligned(["measurement", *names], lines, [False, *([True] * len(names))])
    if ratios := list(_ratio_lines(report, everything=everything)):
        heads = ["ratio of means", "to", "of", "ratio", "95 % interval"]
        text += "\n" + aligned(heads, ratios, [False, False, False, True, False])
    return text + _remarks(report)


def group_text(report: MismatchReport, *, everything: bool) -> str:
    """One row a group."""
    table = report.table
    keys = table.column_names[: table.column_names.index("steps")]
    over = [name for name in table.column_names if name.startswith("over_")]
    main = [*keys, *_MAIN, *(name for name in over if not name.endswith("_fraction"))]
    names = table.column_names if everything else main
    rows = [[_cell(row[name]) for name in names] for row in table.to_pylist()]
    right = [name != "run_id" for name in names]
    return aligned(names, rows, right) + _remarks(report)


def _main_lines(report: MismatchReport, rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    from trajreplay.query.mismatch.plan import over

    yield ["generation KL mean / range", *(_with_range(row, "generation_kl") for row in rows)]
    yield ["valid tokens", *(f"{row['valid_tokens']:,}" for row in rows)]
    for threshold in report.thresholds:
        counts = [share(row[over(threshold)], row["valid_tokens"]) for row in rows]
        yield [f"abs(delta log p) > {threshold}", *counts]
    yield ["max abs(delta log p)", *(significant(row["abs_delta_max"]) for row in rows)]
    yield ["mean abs(delta log p) / range", *(_with_range(row, "abs_delta") for row in rows)]
    for name, label in (("p50", "p50"), ("p99", "p99"), ("p999", "p99.9")):
        found = [significant(row[f"abs_delta_{name}"]) for row in rows]
        yield [f"{label} abs(delta log p)", *found]


def _all_lines(report: MismatchReport, rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    first = report.table.column_names.index("steps")
    for name in report.table.column_names[first:]:
        yield [name, *(_cell(row[name]) for row in rows)]


def _ratio_lines(report: MismatchReport, *, everything: bool) -> Iterator[list[str]]:
    for row in report.comparison.to_pylist():
        if everything or row["statistic"] in ("generation_kl", "abs_delta"):
            interval = f"{significant(row['low'])}-{significant(row['high'])}"
            yield [
                row["statistic"],
                printable(row["base_run"]),
                printable(row["run_id"]),
                significant(row["ratio"]),
                "-" if row["low"] is None else interval,
            ]


def _with_range(row: dict[str, Any], name: str) -> str:
    low, high = (significant(row[f"{name}_step_{end}"]) for end in ("min", "max"))
    return f"{significant(row[name])} / {low}-{high}"


def _cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value}"
    return printable(value) if isinstance(value, str) else significant(value)


def _remarks(report: MismatchReport) -> str:
    lines = [f"\n{printable(report.pair)}\n"]
    lines += [
        f"{one.severity}: run {printable(one.run_id)}: {printable(one.message)}\n"
        for one in report.findings
    ]
    return "".join(lines)

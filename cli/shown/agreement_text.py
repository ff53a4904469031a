"""Agreement of routes as text: a table a run, and whether differing tokens carry the tail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trajreplay.cli.shown.mismatch_text import share, significant
from trajreplay.cli.terminal.text import aligned, printable

if TYPE_CHECKING:
    from trajreplay.query.experts import AgreementReport

_SIDES = ("agreeing", "differing")
_SIZES = ("p50", "p99", "max")


def agreement_text(report: AgreementReport) -> str:
    """One table a run with a row a layer, what it comes to, and what is to be said."""
    by_run: dict[str, list[dict[str, Any]]] = {}
    for row in report.table.to_pylist():
        by_run.setdefault(row["run_id"], []).append(row)
    parts = [_run_text(report, run_id, rows) for run_id, rows in by_run.items()]
    remarks = [
        f"{one.severity}: run {printable(one.run_id)}: {printable(one.message)}\n"
        for one in report.findings
    ]
    return "\n".join(parts) + "".join(["\n", *remarks] if remarks else remarks)


def _run_text(report: AgreementReport, run_id: str, rows: list[dict[str, Any]]) -> str:
    trainer, sampler = report.names
    heads = ["layer", "tokens", "equal sets", "equal order", "no route"]
    heads += [f"{side} {size}" for side in _SIDES for size in (*_SIZES, f"> {report.threshold}")]
    table = aligned(heads, [_cells(row) for row in rows], [False, *([True] * (len(heads) - 1))])
    title = f"run {printable(run_id)}: {trainer} against {sampler}, of {report.levels[run_id]}s"
    return f"{title}\n{table}{_summary(report.threshold, rows[0])}\n"


def _cells(row: dict[str, Any]) -> list[str]:
    cells = ["all" if row["layer"] is None else str(row["layer"]), f"{row['tokens']:,}"]
    cells += [_percent(row[name]) for name in ("equal_sets", "equal_ordered")]
    cells.append(f"{row['without_route']:,}")
    for side in _SIDES:
        cells += [significant(row[f"{side}_abs_delta_{size}"]) for size in _SIZES]
        cells.append(share(row[f"{side}_over"], row[f"{side}_tokens"]))
    return cells


def _summary(threshold: float, row: dict[str, Any]) -> str:
    """Say whether the tokens whose experts differ carry the tail."""
    if not row["tokens"]:
        return "Nothing is compared: no token has a route on both sides."
    over = row["agreeing_over"] + row["differing_over"]
    differing = share(row["differing_tokens"], row["tokens"])
    if not over:
        return (
            f"No token has abs(delta log p) > {threshold}; of all {row['tokens']:,}, {differing} "
            "have other experts in some layer."
        )
    return (
        f"Of {over:,} tokens with abs(delta log p) > {threshold}, "
        f"{share(row['differing_over'], over)} have other experts in some layer; of all "
        f"{row['tokens']:,}, {differing}."
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.4g} %"

"""A replay report as data: the JSON document, or rows of one cohort and stage each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trajreplay.cli.shown.report_text import ReportText
from trajreplay.cli.terminal.output import Output

if TYPE_CHECKING:
    import pyarrow as pa

    from trajreplay.stages import CohortReport, Report, StageResult


def write_report(report: Report, output: Output, *, everything: bool = False) -> None:
    """Write a report in the chosen format.

    Text and JSON hold all of it, ndjson a cohort a line, csv and parquet a row for each stage of
    each cohort with the first value that differs.
    """
    if output.format == "table":
        output.text(ReportText(report, color=output.has_color, everything=everything).render())
    elif output.format == "json":
        output.document(report.to_json())
    else:
        output.note_refused(report.refused)
        if output.format == "ndjson":
            output.lines(one.to_json() for one in report.cohorts)
        else:
            output.rows(report_table(report))


def report_table(report: Report) -> pa.Table:
    """One row for each stage of each cohort; a cohort without stages has one row of its own."""
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int64(), pa.float64()
    types = {
        "run_id": text,
        "attempt": whole,
        "rollout_id": whole,
        "step_id": whole,
        "cohort_verdict": text,
        "stage": text,
        "version": text,
        "capability": text,
        "verdict": text,
        "isolated": text,
        "chained": text,
        "inherited": pa.bool_(),
        "suspect": text,
        "message": text,
        "max_abs_error": real,
        "chained_error": real,
        "compared": whole,
        "mismatches": whole,
        "non_finite": whole,
        "field": text,
        "sample_id": text,
        "group_id": text,
        "rank": whole,
        "token": whole,
        "recorded": real,
        "recomputed": real,
    }
    rows = []
    for cohort in report.cohorts:
        stages: list[StageResult | None] = [*cohort.stages]
        rows += [_row(cohort, stage) for stage in stages or [None]]
    return pa.Table.from_pylist(rows, schema=pa.schema(list(types.items())))


def _row(cohort: CohortReport, stage: StageResult | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run_id": cohort.run_id,
        "attempt": cohort.attempt,
        "rollout_id": cohort.rollout_id,
        "step_id": cohort.step_id,
        "cohort_verdict": cohort.verdict,
        "message": cohort.refusal,
    }
    if stage is None:
        return row
    # Values as they are: the JSON form has words for what is not finite.
    row |= {name: value for name, value in vars(stage).items() if name != "divergences"}
    if stage.divergences:
        row |= vars(stage.divergences[0])
    return row

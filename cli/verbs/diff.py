"""`trajreplay diff`: where two runs part first, and how the difference grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.options.shared import lake_option, output_options
from trajreplay.cli.options.types import Named
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.progress import ProgressBar
from trajreplay.cli.terminal.text import aligned, counted, number, printable

if TYPE_CHECKING:
    from trajreplay.query.differences import DiffReport, FieldDifference

_SHOWN = 10


@click.command(
    cls=Verb,
    exit_codes={
        0: "They are the same, as far as they were compared.",
        1: "They differ in values, settings, samples or cohorts.",
        2: "The command line is wrong, or they have nothing in common.",
        3: "Nothing differs, and something could not be compared.",
    },
    example="trajreplay diff r3-off r3-on",
)
@click.argument(
    "runs",
    nargs=-1,
    metavar="[RUN_A [RUN_B]]",
    help="The two runs; one of them for two attempts or two lakes. Default: the only run there is.",
)
@lake_option
@click.option(
    "--attempt",
    "attempts",
    multiple=True,
    type=click.IntRange(min=0),
    metavar="N",
    help="Follow this attempt instead of the newest; given twice, once for each side.",
)
@click.option(
    "--against",
    type=Named(),
    metavar="PATH",
    help="Take RUN_B from this lake. Default: from the same.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Absolute difference that counts as equal.",
)
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Difference relative to RUN_B's value that counts as equal.",
)
@click.option("--all", "everything", is_flag=True, help="Show every field of every cohort.")
@output_options
def diff(
    lake_path: str,
    runs: tuple[str, ...],
    attempts: tuple[int, ...],
    against: str | None,
    atol: float,
    rtol: float,
    everything: bool,
    output: Output,
) -> None:
    """Name the first place where two runs, attempts or lakes part, and how it grows.

    Cohorts are aligned by rollout and step, samples by id within them, else by their token ids;
    what is ambiguous is refused. Where samples cannot be aligned, distributions are compared.
    """
    from trajreplay.lake import Lake

    if len(runs) > 2 or len(attempts) > 2:
        raise click.UsageError("expected at most two runs and two attempts")
    if len(runs) < 2 and len(attempts) < 2 and against is None:
        raise click.UsageError("nothing to compare: name two runs, two attempts or --against LAKE")
    either = (*attempts, *attempts) if len(attempts) == 1 else attempts
    with ProgressBar("Comparing", quiet=output.quiet) as progress:
        report = Lake.open(lake_path).diff(
            runs[0] if runs else None,
            runs[-1] if runs else None,
            attempts=(either[0], either[1]) if either else (None, None),
            other=None if against is None else Lake.open(Path(against)),
            atol=atol,
            rtol=rtol,
            progress=progress,
        )
    if output.format == "table":
        lines = diff_lines(report, everything=everything)
        output.text("".join(f"{line}\n" for line in lines))
    elif output.format == "json":
        output.document(report.to_json())
    else:
        output.rows(report.arrow())
        output.note(_summary(report))
    codes = {"same": 0, "different": 1, "refused": 3}
    click.get_current_context().exit(codes[report.verdict])


def diff_lines(report: DiffReport, *, everything: bool = False) -> Iterator[str]:
    """The first divergence, settings that differ, how fields grow, and a closing line."""
    if report.first is not None:
        sides = f"{_value(report.first.left)} in {report.left}, {_value(report.first.right)} in"
        place = f"{_place(report.first)}: {sides} {report.right}"
        yield f"first difference: {printable(place)}"
        yield ""
    if report.settings:
        yield "settings that differ:"
        yield from _table(
            ("setting", report.left, report.right, "from"),
            [
                (one.setting, str(one.left), str(one.right), _cohort(one.rollout_id, one.step_id))
                for one in report.settings
            ],
            everything,
        )
        yield ""
    if report.fields:
        yield "fields that differ:"
        rows = [
            (
                _cohort(one.rollout_id, one.step_id),
                one.stage,
                one.field,
                _of(one),
                f"{one.differing_samples}/{one.samples}" if one.samples else "",
                f"{one.differing_values}/{one.values}",
                "" if one.max_abs is None else number(one.max_abs, 6),
                "" if one.mean_abs is None else number(one.mean_abs, 6),
            )
            for one in report.fields
        ]
        heads = ("cohort", "stage", "field", "of", "samples", "values", "max abs", "mean abs")
        yield from _table(heads, rows, everything)
        yield ""
    yield from _left_over(report)
    yield _summary(report)


def _left_over(report: DiffReport) -> Iterator[str]:
    for side, names in ((report.left, report.only_left), (report.right, report.only_right)):
        if names:
            yield f"only in {printable(side)}: {_some(names)}"
    for label, (left, right) in list(report.unpaired.items())[:_SHOWN]:
        sides = f"{left} samples of {report.left} and {right} of {report.right}"
        yield printable(f"{label}: {sides} have no partner")
    for label, reason in list(report.unaligned.items())[:_SHOWN]:
        yield f"{label}: not aligned: {printable(reason)}"
    shown = [one for one in report.distributions if one.differs]
    for one in shown[:_SHOWN]:
        means = " and ".join("none" if mean is None else number(mean, 6) for mean in one.mean)
        where = _cohort(one.rollout_id, one.step_id)
        yield f"{where}: {one.field}: {one.count[0]} and {one.count[1]} values, means {means}"
    if len(shown) > _SHOWN:
        yield f"and {len(shown) - _SHOWN} more distributions (--format json shows them)"
    for label, reason in list(report.refused.items())[:_SHOWN]:
        yield f"{label}: refused: {printable(reason)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], everything: bool) -> Iterator[str]:
    shown = rows if everything else rows[:_SHOWN]
    safe = [[printable(cell) for cell in row] for row in shown]
    yield aligned(heads, safe).rstrip("\n")
    if len(rows) > len(shown):
        yield f"and {len(rows) - len(shown)} more (--all shows them)"


def _place(one: FieldDifference) -> str:
    sample = "" if one.sample_id is None else f" of sample {one.sample_id}"
    token = "" if one.token is None else f" at {one.token}"
    token += "" if one.layer is None else f", layer {one.layer}"
    of = f" of {_of(one)}" if one.sample_id is None else f" (rank {one.rank})"
    where = _cohort(one.rollout_id, one.step_id)
    return f"{where}, stage {one.stage}, {one.field}{sample}{token}{of}"


def _of(one: FieldDifference) -> str:
    """What a scalar is of: the rank that recorded it, its scope where that is another; or layer."""
    if one.sample_id is not None:
        return "" if one.layer is None else f"layer {one.layer}"
    parts = [f"rank {one.rank}"]
    if one.micro_batch_id is not None:
        parts.append(one.micro_batch_id)
    elif one.scope != "rank":
        parts.append(str(one.scope))
    return ", ".join(parts)


def _value(value: Any) -> str:
    if value is None:
        return "nothing"
    return number(value, 9) if isinstance(value, float) else str(value)


def _cohort(rollout_id: int, step_id: int | None) -> str:
    return f"rollout {rollout_id}" + ("" if step_id is None else f" step {step_id}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _summary(report: DiffReport) -> str:
    fields = len({one.field for one in report.fields})
    parts = [
        f"{counted(report.cohorts, 'cohort')} compared, {report.identical} identical",
        f"{counted(fields, 'field')} differ" if fields != 1 else "1 field differs",
        f"{counted(len(report.settings), 'setting')} differ"
        if len(report.settings) != 1
        else "1 setting differs",
    ]
    if report.by_content:
        parts.append(f"{report.by_content} aligned by content")
    if report.refused:
        parts.append(f"{len(report.refused)} refused")
    return f"{report.verdict}: {report.left} and {report.right}: {', '.join(parts)}"

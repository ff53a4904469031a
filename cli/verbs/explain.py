"""`trajreplay explain`: the known mistakes that reproduce what diverged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.options.selecting import MEMORY, check_selection, selection_options
from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.source import Source, source_options
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.shown.report_text import ReportText
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.progress import ProgressBar
from trajreplay.cli.terminal.text import counted, printable

if TYPE_CHECKING:
    from trajreplay.query import Cohort
    from trajreplay.stages import CohortReport
    from trajreplay.stages.explain import Explained, Explanation

_SHOWN = 10
# Cohorts with one explanation, from which on the first speaks for all.
_MANY = 3


@click.command(
    cls=Verb,
    exit_codes={
        0: "Nothing diverged, so that there is nothing to explain.",
        1: "A cohort diverged, explained or not.",
        3: "None diverged, and one was refused or is unverified.",
    },
    example="trajreplay explain --across",
)
@source_options
@selection_options
@MEMORY
@click.option(
    "--across",
    is_flag=True,
    help="Put explanations that are one together: a line for each, with when it began and where it "
    "shows. Default: a line for each cohort and stage.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Show every explanation in full. Default: one for the cohorts that share it, ten in all.",
)
@output_options
def explain(
    source: Source,
    output: Output,
    across: bool,
    everything: bool,
    **selection: Any,
) -> None:
    """Say which known mistake reproduces what diverged.

    Each stage that diverged on its own is recomputed, over its whole rollout or step, under every
    known mistake and under pairs of them; those that give what was recorded are named, the most
    believable first. Where none does, the shape of the error is said.

    Table and json have all of it. Rows of ndjson, csv and parquet are explanations; the first
    values that are not finite, what differs by its rounding alone and what was not judged are
    told on stderr beside them.
    """
    check_selection(selection)
    everything = everything or output.verbose
    with source.open(output) as lake, ProgressBar("Replaying", quiet=output.quiet) as progress:
        found = lake.explain(progress=progress, **selection)
    write_explained(found, output, across=across, everything=everything)
    click.get_current_context().exit(found.report.exit_code)


def write_explained(
    found: Explained,
    output: Output,
    *,
    across: bool = False,
    everything: bool = False,
    with_report: bool = False,
) -> None:
    """Write explanations, beside the report of the replay where that is asked for."""
    from trajreplay.cli.shown.explain_rows import cluster_table, explanation_table
    from trajreplay.stages.explain import clusters

    for one in found.not_loaded:
        output.note(f"faults that are not tried: {one}")
    together = clusters(found) if across else []
    if with_report and output.format not in ("table", "json"):
        output.note("the rows are explanations: the report is in --format table and json")
    if output.format != "json" and not (with_report and output.is_text):
        output.note_refused(found.report.refused)
        _note_unjudged(found, output, everything)
    if output.format == "table":
        text = "".join(f"{line}\n" for line in _lines(found, across, everything))
        if with_report:
            report = ReportText(found.report, color=output.has_color, everything=everything)
            told = found.explanations or found.non_finite
            text = f"{report.render()}\n{text}" if told else report.render()
        output.text(text)
    elif output.format == "json":
        document = found.to_json()
        if across:
            document["clusters"] = [one.to_json() for one in together]
        output.document(document)
    elif output.format == "ndjson":
        output.lines(one.to_json() for one in (together if across else found.explanations))
        _note_rest(found, output, everything)
    else:
        rows = cluster_table(together) if across else explanation_table(found.explanations)
        output.rows(rows)
        _note_rest(found, output, everything)


def _note_rest(found: Explained, output: Output, everything: bool) -> None:
    """Say beside rows of explanations what is none: the first values that are not finite, ..."""
    several = len({one.run_id for one in found.report.cohorts}) > 1
    told = [f"{_named([one.cohort], several)}: {one.text}" for one in found.non_finite]
    told += [one.text for one in found.rounded]
    for line in told if everything else told[:_SHOWN]:
        output.note(printable(line))
    if not everything and len(told) > _SHOWN:
        output.note(f"and {len(told) - _SHOWN} more (--all shows them)")


def _lines(found: Explained, across: bool, everything: bool) -> Iterator[str]:
    from trajreplay.stages.explain import clusters

    several = len({one.run_id for one in found.report.cohorts}) > 1
    if across:
        told = [(f"run {one.run_id}" if several else "", one.text) for one in clusters(found)]
    else:
        told = []
        for alike in [[one] for one in found.explanations] if everything else _alike(found):
            place = _named([one.cohort for one in alike[:1]], several)
            told.append((place, alike[0].text))
            if len(alike) > 1:
                rest = _named([one.cohort for one in alike[1:]], several)
                told.append((rest, f"{alike[0].stage}: the same explanation"))
    odd = [(_named([one.cohort], several), one.text) for one in found.non_finite]
    shown = [*told, *odd] if everything else [*told[:_SHOWN], *odd[:_MANY]]
    for place, text in shown:
        yield printable(f"{place}: {text}" if place else text)
    left = len(told) + len(odd) - len(shown)
    if left:
        yield f"and {counted(left, 'further explanation')} (--all shows them)"
    yield from (one.text for one in found.rounded)
    if not told and not odd:
        yield f"{found.report.verdict}: nothing diverged"


def _note_unjudged(found: Explained, output: Output, everything: bool) -> None:
    """Name the cohorts that were refused or are not verified, those of one reason together."""
    from trajreplay.query import Cohort

    by_reason: dict[str, list[Cohort]] = {}
    for one in found.report.cohorts:
        if reason := _not_judged(one):
            place = Cohort(one.run_id, one.attempt, one.rollout_id, one.step_id)
            by_reason.setdefault(reason, []).append(place)
    several = len({one.run_id for one in found.report.cohorts}) > 1
    told = [f"{_named(places, several)}: {reason}" for reason, places in by_reason.items()]
    for line in told if everything else told[:_SHOWN]:
        output.note(f"Not explained: {line}")
    if not everything and len(told) > _SHOWN:
        output.note(f"Not explained: {len(told) - _SHOWN} more (--all shows them)")


def _not_judged(one: CohortReport) -> str:
    """Why a cohort was refused, or what of it is not verified; empty of others."""
    if one.refusal:
        return one.refusal
    if one.verdict != "unverified":
        return ""
    left = (
        f"{stage.stage} is {stage.verdict}: {stage.message}"
        for stage in one.stages
        if stage.verdict in ("unverified", "refused")
    )
    return next(left, "nothing of it was compared")


def _alike(found: Explained) -> list[list[Explanation]]:
    """Explanations that name the same faults at one stage, put together where they are many."""
    sets: dict[tuple[object, ...], list[Explanation]] = {}
    for number, one in enumerate(found.explanations):
        faults = one.first.faults if one.first else (number,)
        doubt = one.first.doubt if one.first else ""
        sets.setdefault((one.cohort.run_id, one.stage, one.warns, doubt, *faults), []).append(one)
    return [
        part
        for alike in sets.values()
        for part in ([alike] if len(alike) >= _MANY else [[one] for one in alike])
    ]


def _named(places: Sequence[Cohort], several: bool) -> str:
    """Cohorts in words: a few by name, of more the first and the last."""
    names = [str(one) if several else str(one).partition("' ")[2] for one in places]
    if len(names) <= _MANY:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)} cohorts)"

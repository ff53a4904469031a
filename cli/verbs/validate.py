"""`trajreplay validate`: whether a lake is whole, without recomputing anything."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from trajreplay.cli.options.selecting import MEMORY
from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.source import Source, source_options
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.progress import ProgressBar
from trajreplay.cli.terminal.text import counted, printable

if TYPE_CHECKING:
    from trajreplay.query import ValidationFinding, ValidationReport

_SHOWN = 10
# What a message calls a capture set, or the rollout that one consumed from.
_COHORT = re.compile(r"run (?:'[^']*'|\"[^\"]*\")|\b(?:attempt|rollout|step|rank) \d+")
_COLORS = {"error": "red", "warning": "yellow", "info": "cyan"}


@click.command(
    cls=Verb,
    exit_codes={0: "Nothing that a replay would refuse.", 1: "", 3: "There are errors."},
    example="trajreplay validate",
)
@source_options
@click.option(
    "--deep",
    is_flag=True,
    help="Decode the lists of numbers too, make the digest of each column anew, and check each "
    "cohort for what no healthy training records. Default: the digest of each file's bytes says "
    "that they are those that were captured.",
)
@MEMORY
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Show every finding. Default: the first ten of a kind, those that say the same of several "
    "files told once.",
)
@output_options
def validate(
    source: Source, output: Output, deep: bool, everything: bool, memory_bytes: int
) -> None:
    """Check that a lake, or a file of another tool, is whole, without arithmetic.

    Format, integrity (digests, counts, types), safety (links, paths), completeness of each rollout
    and step, closure and redaction, of every capture and every byte. With --deep also whether the
    lists of numbers are what their entries say of them, and what no healthy training records:
    shifted columns, permuted samples, doubled ranks and the like.
    """
    with source.open(output) as lake, ProgressBar("Validating", quiet=output.quiet) as progress:
        report = lake.validate(deep=deep, memory_bytes=memory_bytes, progress=progress)
    if output.format == "table":
        lines = validation_lines(report, color=output.has_color, everything=everything)
        output.text("".join(f"{line}\n" for line in lines))
    else:
        output.rows(report.arrow())
        output.note(_summary(report))
    click.get_current_context().exit(0 if report.ok else 3)


def validation_lines(
    report: ValidationReport, *, color: bool = False, everything: bool = False
) -> Iterator[str]:
    """The findings, worst first, and a closing line that says what was looked at."""
    kinds: dict[tuple[str, str], list[ValidationFinding]] = defaultdict(list)
    for severity in _COLORS:
        for one in report.findings:
            if one.severity == severity:
                kinds[severity, one.check].append(one)
    for (severity, check), of_kind in kinds.items():
        painted = click.style(severity, fg=_COLORS[severity]) if color else severity
        together = [[one] for one in of_kind]
        if not everything and severity != "error":  # of those each place is one to go to
            together = _alike(of_kind)
        for alike in together if everything else together[:_SHOWN]:
            one = alike[0]
            path = "" if one.path is None or one.path in one.message else f"{one.path}: "
            many = f"{len(alike)} alike, the first " if len(alike) > 1 else ""
            yield f"{painted} {check}: {many}{printable(path + one.message)}"
        left = sum(map(len, together[_SHOWN:]))
        if not everything and left:
            yield f"{painted} {check}: and {left} more (--all shows them)"
    yield _summary(report)


def _alike(found: list[ValidationFinding]) -> list[list[ValidationFinding]]:
    """Findings that say the same of different files, rollouts and steps, put together."""
    said: dict[str, list[ValidationFinding]] = defaultdict(list)
    for one in found:
        text = one.message if one.path is None else one.message.replace(one.path, "")
        said[_COHORT.sub("", text)].append(one)
    return list(said.values())


def _summary(report: ValidationReport) -> str:
    counts = [counted(report.counts[one], one) for one in _COLORS if one in report.counts]
    looked_at = (
        f"{counted(report.captures, 'capture')}, {counted(report.files, 'file')}, "
        f"{counted(report.bytes, 'byte')}"
    )
    found = ", ".join(counts) or "nothing found"
    return f"{'ok' if report.ok else 'broken'}: {looked_at}: {found}"

"""`trajreplay export`: selected captures as bundles of another tool, or as a small lake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trajreplay.cli.options.shared import ATTEMPT, RUN, lake_option, quiet_options
from trajreplay.cli.options.types import Place, RedactionRule, StepIdentity
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.text import counted, folded, printable


@click.command(
    cls=Verb,
    exit_codes={0: "All of it is written.", 1: ""},
    example="trajreplay export bundle --step 120:0 -o step-120.tar.zst",
)
@click.argument(
    "what",
    type=click.Choice(["bundle", "lake"]),
    help="Relax replay bundles of format 1.0.0, or a lake.",
)
@lake_option
@click.option(
    "--where",
    metavar="SQL",
    help="Rollouts and steps that have a sample for which this boolean expression over the columns "
    "of rollouts and steps holds. Default: all.",
)
@RUN
@ATTEMPT
@click.option(
    "--rollout",
    "rollouts",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="R",
    help="Rollout R and its steps; excludes --step. May be given several times. Default: all.",
)
@click.option(
    "--step",
    "steps",
    type=StepIdentity(),
    multiple=True,
    metavar="R:S",
    help="Step S of rollout R; excludes --rollout. May be given several times. Default: all.",
)
@click.option(
    "--redact",
    "redaction",
    type=RedactionRule(),
    multiple=True,
    metavar="FIELD=RULE",
    help="Of a lake: keep less of a text field: truncate:N, hash or drop. May be given several "
    "times. Default: as it was captured.",
)
@click.option(
    "-o",
    "--output",
    "target",
    required=True,
    type=Place(),
    help="Folder of the bundles, or of the new lake; a name ending in .tar.zst becomes one file.",
)
@quiet_options
def export(
    lake_path: str,
    what: str,
    target: Path,
    redaction: tuple[tuple[str, str], ...],
    quiet: bool,
    verbose: bool,
    **selection: Any,
) -> None:
    """Write selected rollouts and steps for others: as bundles, or as a small lake.

    Each is taken whole. A lake brings the rollouts that its steps consumed from, and every column
    keeps its digest. What a bundle cannot hold is said on stderr.
    """
    from trajreplay.lake import Lake

    if selection["steps"] and selection["rollouts"]:
        raise click.UsageError(
            "--step R:S names the rollout already: give it or --rollout, not both."
        )
    if redaction and what == "bundle":
        raise click.UsageError("--redact is for a lake: a bundle holds no text.")
    lake = Lake.open(lake_path)
    if what == "lake":
        report = lake.export_lake(target, redaction=dict(redaction), **selection)
        if not report.ok:
            click.get_current_context().exit(3)
        click.echo(printable(str(target)))
        done = f"{counted(report.captures, 'capture')} copied, every digest verified"
    else:
        written = lake.export_bundles(target, **selection)
        for one in written:
            click.echo(printable(str(target) if target.suffix == ".zst" else str(one.path)))
        notes = folded((one.path.name, note) for one in written for note in one.notes)
        for note in notes if not quiet else ():
            click.echo(f"Note: {printable(note)}", err=True)
        done = f"{counted(len(written), 'bundle')} written"
    if not quiet:
        click.echo(done, err=True)

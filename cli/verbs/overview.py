"""`trajreplay info` and `trajreplay inspect`: what is in a lake, at a glance and in detail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from trajreplay.cli.options.shared import ATTEMPT, RUN, lake_option, output_options
from trajreplay.cli.options.source import Source, source_options
from trajreplay.cli.options.types import StepIdentity
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.shown.inspect_text import column_rows, inspection_text
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.progress import ProgressBar

if TYPE_CHECKING:
    from trajreplay.lake import Lake


@click.command(
    cls=Verb,
    exit_codes={0: "Done, whatever the lake's state.", 1: ""},
    example="trajreplay info",
)
@lake_option
@RUN
@click.option(
    "--cohorts",
    is_flag=True,
    help="Show a row for each rollout and each step. Default: a row for each attempt.",
)
@output_options
def info(lake_path: str, output: Output, run: str | None, cohorts: bool) -> None:
    """Show what a lake holds, a row for each attempt.

    Runs and attempts with their rollouts, steps, ranks, samples, tokens and bytes; how many of the
    rollouts and steps are complete, incomplete, refused or superseded; and the first problem. An
    attempt that captured nothing has a row of zeros.
    """
    from trajreplay.lake import Lake

    with ProgressBar("Reading", quiet=output.quiet) as progress:
        lake = Lake.open(lake_path)
        found = (lake.info if cohorts else lake.attempts)(run=run, progress=progress)
    output.rows(found, cell_width=None)


@click.command(
    cls=Verb,
    exit_codes={
        0: "Done, whatever the captures' state.",
        1: "",
        2: "There is no such capture.",
        3: "A file of PATH was refused.",
    },
    example="trajreplay inspect --step 120:0",
)
@source_options
@RUN
@ATTEMPT
@click.option(
    "--rollout",
    "rollout_id",
    type=click.IntRange(min=0),
    metavar="R",
    help="The captures of rollout R; excludes --step. Default: the only ones of PATH.",
)
@click.option(
    "--step",
    type=StepIdentity(),
    metavar="R:S",
    help="The captures of step S of rollout R; excludes --rollout. Default: the only ones of PATH.",
)
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="N",
    help="Only what this rank captured. May be given several times. Default: all.",
)
@output_options
def inspect(
    source: Source,
    output: Output,
    run: str | None,
    attempt: int | None,
    rollout_id: int | None,
    step: tuple[int, int] | None,
    ranks: tuple[int, ...],
) -> None:
    """Show who wrote each capture, and what is in it.

    Identity, producer, parallel coordinates, settings, declared stages, recorded columns and
    scalars of each rank's capture of one rollout or step, complete or not.
    """
    import pyarrow as pa

    from trajreplay import CaptureError, QueryError

    named = [one for one in (rollout_id, step) if one is not None]
    if len(named) > 1 or not (named or source.is_files):
        raise click.UsageError("Give one of --rollout R and --step R:S.")
    with source.open(output) as lake:
        refused = lake.imported.refused if lake.imported else []
        places = _places(lake) if refused or not named else []
        if refused and not places:
            raise CaptureError(refused[0].problem, hint=refused[0].hint)
        place = step or (rollout_id, None) if named else _only(places)
        found = lake.inspect(*place, run=run, attempt=attempt).to_json()
    captures = [one for one in found["captures"] if not ranks or one["rank"] in ranks]
    if not captures:
        there = ", ".join(str(one["rank"]) for one in found["captures"])
        raise QueryError(
            f"no capture of rank {', '.join(map(str, ranks))}, expected one of {there}"
        )
    found["captures"] = captures
    if output.format == "table":
        output.text(inspection_text(found, everything=output.verbose))
    elif output.format == "json":
        output.document(found)
    elif output.format == "ndjson":
        output.lines(captures)
    else:
        output.rows(pa.Table.from_pylist(column_rows(found)))
    output.note_refused({one.path: one.problem for one in refused})
    click.get_current_context().exit(3 if refused else 0)


def _places(lake: Lake) -> list[tuple[int, int | None]]:
    """The rollouts and steps that a lake holds."""
    return [(one["rollout_id"], one["step_id"]) for one in lake.info().to_pylist()]


def _only(places: list[tuple[int, int | None]]) -> tuple[int, int | None]:
    """The rollout or step that a lake of files holds.

    Raises:
        QueryError: It holds several, or events only.
    """
    from trajreplay import QueryError

    if not places:
        raise QueryError(
            "the files hold events, and no samples of a rollout or step",
            hint="Import them, and ask for the table events: trajreplay import KIND PATH",
        )
    if len(places) > 1:
        shown = [f"--rollout {r}" if s is None else f"--step {r}:{s}" for r, s in places[:5]]
        raise QueryError(
            f"there are {len(places)} rollouts and steps, expected one to be named",
            hint=f"Give one of {', '.join(dict.fromkeys(shown))}; of several runs also --run.",
        )
    return places[0]

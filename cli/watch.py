"""`trajreplay watch`: a lake followed while it is written, a line for each cohort."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trajreplay.cli.errors import DIFFERS, REFUSED
from trajreplay.cli.options import ATTEMPT, RUN, lake_option, quiet_options
from trajreplay.cli.text import counted, number, printable
from trajreplay.cli.values import json_text
from trajreplay.cli.verb import Verb

if TYPE_CHECKING:
    from trajreplay.stages import CohortReport


@click.command(
    cls=Verb,
    exit_codes={
        0: "With --once: every cohort that was new passes.",
        1: "A cohort diverged, with --once or --fail-fast.",
        3: "With --once: none diverged, and one was refused or is unverified.",
    },
    example="trajreplay watch --fail-fast --state watch.json",
)
@lake_option
@RUN
@ATTEMPT
@click.option(
    "--state",
    "state_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Remember in this file what was reported, so that a restart does not repeat it. Default: "
    "begin with what is in the lake.",
)
@click.option(
    "--fail-fast", is_flag=True, help="End at the first cohort that diverged. Default: go on."
)
@click.option("--once", is_flag=True, help="Report what is whole now, and end. Default: go on.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@click.option(
    "--format",
    "format_name",
    type=click.Choice(("table", "ndjson")),
    default="table",
    show_default=True,
    help="A line of text, or of JSON, for each cohort.",
)
@quiet_options
def watch(
    lake_path: str,
    run: str | None,
    attempt: int | None,
    state_path: Path | None,
    fail_fast: bool,
    once: bool,
    interval: float,
    format_name: str,
    quiet: bool,
    verbose: bool,
) -> None:
    """Follow a lake that is being written, and replay each cohort as it becomes whole.

    A cohort is reported once, when every expected rank has committed it or given it up; a step
    waits for its rollouts. Ends on Ctrl-C.
    """
    del verbose
    from trajreplay.lake import Lake
    from trajreplay.stages.watch import load_state, save_state

    lake = Lake.open(lake_path)
    seen = load_state(state_path, lake.path) if state_path else set()
    if seen and not quiet:
        click.echo(f"reported before: {counted(len(seen), 'cohort')}", err=True)
    following = lake.watch(run, attempt=attempt, seen=seen)
    worst = 0
    while True:
        for one in following.poll():
            line = json_text(one.to_json()) if format_name == "ndjson" else watch_line(one)
            click.echo(line)
            following.done(one)
            if state_path:
                save_state(state_path, lake.path, following.seen)
            if one.verdict == "diverged":
                worst = DIFFERS
            elif one.verdict in ("refused", "unverified"):
                worst = worst or REFUSED
            if fail_fast and one.verdict == "diverged":
                click.get_current_context().exit(DIFFERS)
        if once:
            if following.pending and not quiet:
                click.echo(f"not whole yet: {counted(following.pending, 'cohort')}", err=True)
            click.get_current_context().exit(worst)
        time.sleep(interval)


def watch_line(one: CohortReport) -> str:
    """A cohort in a line: its verdict and, where it is none to be glad of, why."""
    step = "" if one.step_id is None else f" step {one.step_id}"
    attempt = f" attempt {one.attempt}" if one.attempt else ""
    name = f"{one.run_id}{attempt} rollout {one.rollout_id}{step}"
    return printable(f"{name}: {one.verdict}{_why(one)}")


def _why(one: CohortReport) -> str:
    if one.refusal:
        return f": {' '.join(one.refusal.split())}"
    stage = next((found for found in one.stages if found.stage == one.first_divergent_stage), None)
    if stage is None:
        return ""
    shown = next(iter(stage.divergences), None)
    if shown is None:
        return f": {stage.stage}"
    return (
        f": {stage.stage}, {shown.field} recorded {_shown(shown.recorded)}, recomputed "
        f"{_shown(shown.recomputed)}"
    )


def _shown(value: object) -> str:
    return number(value, 9) if isinstance(value, float) else str(value)

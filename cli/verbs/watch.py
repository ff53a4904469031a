"""`trajreplay watch`: a lake followed while it is written, a line for each cohort."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trajreplay.cli.options.shared import ATTEMPT, RUN, lake_option, quiet_options
from trajreplay.cli.options.types import Named, Place
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.errors import DIFFERS, REFUSED
from trajreplay.cli.terminal.sink import check_place
from trajreplay.cli.terminal.text import counted, number, printable
from trajreplay.cli.terminal.values import json_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trajreplay.query import Cohort
    from trajreplay.stages import CohortReport
    from trajreplay.stages.gate import CheckVerdict, Policy
    from trajreplay.stages.watch import Watch


@click.command(
    cls=Verb,
    exit_codes={
        0: "With --once: every cohort that was new passes.",
        1: "A cohort diverged or fails the policy, with --once or --fail-fast.",
        3: "With --once: none diverged, and one was refused or is unverified, or there is none.",
    },
    example="trajreplay watch --fail-fast --state watch.json",
)
@lake_option
@RUN
@ATTEMPT
@click.option(
    "--state",
    "state_path",
    type=Place(dir_okay=False),
    help="Remember in this file what was reported, so that a restart does not repeat it. Default: "
    "begin with what is in the lake.",
)
@click.option(
    "--policy",
    type=Named(),
    metavar="POLICY",
    help="Hold every cohort against the checks of a TOML file, or of router-replay, replay-clean, "
    "mismatch-baseline, that one cohort can fail. Default: replay alone.",
)
@click.option(
    "--fail-fast",
    is_flag=True,
    help="End at the first cohort that diverged or fails the policy. Default: go on.",
)
@click.option("--once", is_flag=True, help="Report what is whole now, and end. Default: go on.")
@click.option(
    "--wait",
    type=click.IntRange(min=0),
    metavar="LOOKS",
    help="Looks for which a step waits for a rollout that it consumed and of which nothing is "
    "there; then it is reported without. Default: 3, and 0 with --once.",
)
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
    policy: str | None,
    fail_fast: bool,
    once: bool,
    wait: int | None,
    interval: float,
    format_name: str,
    quiet: bool,
    verbose: bool,
) -> None:
    """Follow a lake that is being written, and replay and gate each cohort as it becomes whole.

    A cohort is reported once, when every expected rank has committed it or given it up; a step
    waits for its rollouts. Ends on Ctrl-C.
    """
    del verbose
    from trajreplay.lake import Lake
    from trajreplay.stages.watch import save_state

    lake = Lake.open(lake_path)
    seen = _reported_before(state_path, lake.path)
    if seen and not quiet:
        click.echo(f"reported before: {counted(len(seen), 'cohort')}", err=True)
    if once and wait is None:
        wait = 0
    following = lake.watch(run, attempt=attempt, seen=seen, policy=_policy(policy), wait=wait)
    worst = 0
    while True:
        for one in following.poll():
            checks = following.gate(one)
            if format_name == "ndjson":
                held = {"gate": [vars(check) for check in checks]} if policy else {}
                click.echo(json_text(one.to_json() | held))
            else:
                click.echo(watch_line(one, checks))
            following.done(one)
            if state_path:
                save_state(state_path, lake.path, following.seen)
            if one.verdict == "diverged" or any(check.verdict == "fail" for check in checks):
                worst = DIFFERS
            elif one.verdict in ("refused", "unverified"):
                worst = worst or REFUSED
            if fail_fast and worst == DIFFERS:
                click.get_current_context().exit(DIFFERS)
        if once:
            if following.pending and not quiet:
                click.echo(f"not whole yet: {counted(following.pending, 'cohort')}", err=True)
            _check_reported(following, lake.path)
            click.get_current_context().exit(worst)
        time.sleep(interval)


def _reported_before(state_path: Path | None, lake: str) -> set[Cohort]:
    """What an earlier watch reported of a lake, by the file that it remembers it in.

    Raises:
        click.UsageError: The file cannot be one.
        SinkError: It cannot be written.
        QueryError: It is the state of no watch, or that of another lake.
    """
    from trajreplay.stages.watch import load_state

    if state_path is None:
        return set()
    check_place(state_path, "--state")
    return load_state(state_path, lake)


def _check_reported(following: Watch, lake: str) -> None:
    """Refuse to end well where nothing was compared, now or by an earlier watch.

    Raises:
        DatasetError: There is no such run or attempt, or no cohort of it is whole.
    """
    from trajreplay.schema.errors import DatasetError

    if following.reported:
        return
    of = "" if following.run is None else f" of run {following.run!r}"
    of += "" if following.attempt is None else f" in attempt {following.attempt}"
    raise DatasetError(
        f"{lake}: nothing was compared, there is no whole cohort{of}",
        hint="To see what there is: trajreplay info",
    )


def _policy(named: str | None) -> Policy | None:
    """The policy; steps are counted over a run, not here."""
    if named is None:
        return None
    from trajreplay.stages.gate import load_gate_policy

    return load_gate_policy(named, run="intermediate")


def watch_line(one: CohortReport, checks: Sequence[CheckVerdict] = ()) -> str:
    """A cohort in a line: its verdict, the checks that fail and, where there is need, why."""
    step = "" if one.step_id is None else f" step {one.step_id}"
    attempt = f" attempt {one.attempt}" if one.attempt else ""
    name = f"{one.run_id}{attempt} rollout {one.rollout_id}{step}"
    failing = [check for check in checks if check.verdict == "fail" and check.check != "replay"]
    told = "".join(f"; fails {check.check}: {check.reason}" for check in failing)
    return printable(f"{name}: {one.verdict}{_why(one)}{told}")


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

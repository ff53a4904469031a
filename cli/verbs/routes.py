"""`trajreplay routes`: router-replay traces held against a transport contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.types import Place
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.text import counted, printable

if TYPE_CHECKING:
    from trajreplay.query.routes import RouteFinding, RouteReport

_SHOWN = 5
_COLORS = {"failure": "red", "unverified": "yellow", "remark": "cyan"}


@click.command(
    cls=Verb,
    exit_codes={
        0: "No rule is broken.",
        1: "A rule is broken, or required and not decided.",
        2: "The command line or the policy is wrong.",
        3: "The folder cannot be read.",
    },
    example="trajreplay routes logs/r3_trace --contract transfer-queue",
)
@click.argument(
    "traces",
    type=Place(file_okay=False),
    help="Folder of the traces, NRL_R3_TRACE_DIR of the training job.",
)
@click.option(
    "--contract",
    type=click.Choice(("legacy-async", "transfer-queue")),
    help="How routes travel from sampler to trainer; never inferred. Default: the policy's.",
)
@click.option(
    "--policy",
    "policy_path",
    type=Place(dir_okay=False),
    help="TOML file with what the run states; other options count before it.",
)
@click.option(
    "--replays",
    "stages",
    multiple=True,
    metavar="STAGE",
    help="A stage that replays routes. Default: prev-logprob and train.",
)
@click.option(
    "--require",
    multiple=True,
    metavar="RULE",
    help="A rule that has to be decided: unverified fails. Default: none.",
)
@click.option(
    "--ignore",
    multiple=True,
    metavar="EVENT",
    help="An event that is not known here and is left out. Default: none; it fails.",
)
@click.option(
    "--process",
    "processes",
    multiple=True,
    metavar="HOST:PID",
    help="A process of the attempt. Default: all.",
)
@click.option(
    "--since",
    type=float,
    metavar="SECONDS",
    help="First second of the attempt, since the epoch. Default: any.",
)
@click.option(
    "--until",
    type=float,
    metavar="SECONDS",
    help="Last second of the attempt, since the epoch. Default: any.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Show every finding. Default: the first five of a rule.",
)
@output_options
def routes(
    traces: Path, policy_path: Path | None, output: Output, everything: bool, **stated: Any
) -> None:
    """Check router-replay (R3) traces under a stated transport contract.

    Every stage, rank and layer that should replay does, with the routes that were produced; what
    hashes and previews cannot decide is reported unverified and fails only where it is required.
    """
    from trajreplay.query.routes import check_routes, load_policy, policy_of

    given = {name: value for name, value in stated.items() if value not in (None, ())}
    if policy_path is not None:
        policy = load_policy(policy_path, **given)
    else:
        policy = policy_of(given, "the options")
    report = check_routes(traces, policy)
    if output.format == "table":
        lines = route_lines(report, color=output.has_color, everything=everything)
        output.text("".join(f"{line}\n" for line in lines))
    elif output.format == "json":
        output.document(report.to_json())
    else:
        output.rows(report.arrow())
        output.note(_summary(report))
    click.get_current_context().exit(0 if report.verdict == "pass" else 1)


def route_lines(
    report: RouteReport, *, color: bool = False, everything: bool = False
) -> Iterator[str]:
    """The findings, failures first, and closing lines with the verdict and what it covers."""
    alike: dict[tuple[str, str], list[RouteFinding]] = {}
    for one in report.findings:
        alike.setdefault((one.severity, one.rule), []).append(one)
    for (severity, rule), found in alike.items():
        painted = click.style(severity, fg=_COLORS[severity]) if color else severity
        for one in found if everything else found[:_SHOWN]:
            yield f"{painted} {rule}: {printable(one.message)}"
        if not everything and len(found) > _SHOWN:
            yield f"{painted} {rule}: and {len(found) - _SHOWN} more (--all shows them)"
    for name in report.undecided:
        yield f"required and not decided: {name}"
    yield _summary(report)


def _summary(report: RouteReport) -> str:
    steps = "; ".join(
        f"{stage} step {', '.join(map(str, traced))}" for stage, traced in report.steps.items()
    )
    covered = (
        f"{counted(report.records, 'record')}, {counted(len(report.ranks), 'rank')}, layers "
        f"{', '.join(map(str, report.layers)) or 'none'}, traced {steps or 'nothing'}"
    )
    if report.stopped:
        covered = f"{counted(report.records, 'record')}, of which nothing more was checked"
    left_out = f", {report.left_out} records left out" if report.left_out else ""
    outcomes = Counter(report.statuses.values())
    rules = ", ".join(
        f"{count} {status}" for status, count in sorted(outcomes.items()) if status != "pass"
    )
    rules = f"{outcomes['pass']} rules pass" + (f", {rules}" if rules else "")
    return f"{report.verdict} under {report.policy.contract}: {rules}; {covered}{left_out}"

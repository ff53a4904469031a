"""`trajreplay replay`: recompute what was selected and say where it first differs."""

from __future__ import annotations

from typing import Any

import click

from trajreplay.cli.options.selecting import MEMORY, check_selection, selection_options
from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.source import Source, source_options
from trajreplay.cli.options.types import RewardName, SettingChange
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.shown.report_rows import write_report
from trajreplay.cli.shown.what_if import write_what_if
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.progress import ProgressBar
from trajreplay.cli.verbs.explain import write_explained


@click.command(
    cls=Verb,
    exit_codes={
        0: "Every cohort passes.",
        1: "A cohort diverged.",
        3: "None diverged, and one was refused or is unverified.",
    },
    example='trajreplay replay --where "rollout_id=120"',
)
@source_options
@selection_options
@click.option(
    "--closure",
    type=click.Choice(["group", "cohort"]),
    default="group",
    show_default=True,
    help="What a selection is widened to: whole groups, with the stages over a whole rollout or "
    "step only where the groups are all of it; or the whole rollout or step.",
)
@click.option(
    "--allow-partial",
    is_flag=True,
    help="Look at cohorts of which ranks are missing, too; they are never a pass. Default: refuse.",
)
@click.option(
    "--require-stages",
    is_flag=True,
    help="Count every stage that was not compared as unverified. Default: only those declared.",
)
@click.option(
    "--reward",
    type=RewardName(),
    metavar="FUNCTION",
    help="Recompute raw rewards with this function of one sample: module:function, or an entry "
    "point of the group trajreplay.rewards. Default: compare them with what was recorded beside "
    "them.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    metavar="NUMBER",
    help="Pass where |recorded - recomputed| <= atol + rtol |recomputed|, in the unit of the "
    "value. What only a tolerance looser than the policy's accepts is precision. Default: 1e-06.",
)
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    metavar="NUMBER",
    help="See --atol. Default: 1e-05, or that of the recorded dtype.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="Show as precision everything that has not, bit for bit, what float32 arithmetic gives in "
    "the order of tokens and samples. Default: within the tolerance.",
)
@click.option(
    "--set",
    "changes",
    type=SettingChange(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Recompute under this setting instead of the captured one, such as "
    "loss.eps_clip_high=0.28, and show what changes by stage; no verdict. May be given several "
    "times. Default: judge what was recorded.",
)
@click.option(
    "--explain",
    "explained",
    is_flag=True,
    help="Also search the known mistakes for those that reproduce each divergence.",
)
@MEMORY
@click.option(
    "--all", "everything", is_flag=True, help="Show every cohort and value. Default: the first."
)
@output_options
def replay(
    source: Source,
    output: Output,
    everything: bool,
    run: str | None,
    changes: tuple[tuple[str, Any], ...],
    explained: bool,
    **selection: Any,
) -> None:
    """Recompute every stage from reward to loss and name the first one that differs.

    Without a selection, of the whole lake, or of the files at PATH. Selections combine: a sample
    has to satisfy all.
    """
    check_selection(selection)
    if changes and explained:
        raise click.UsageError("--explain explains a verdict, and --set gives none.")
    if changes or explained:
        _refuse(("atol", "rtol", "exact"), selection, "--set" if changes else "--explain")
    if changes:
        _show_what_if(source, output, dict(changes), {"run": run, **selection})
        return
    everything = everything or output.verbose
    with source.open(output) as lake, ProgressBar("Replaying", quiet=output.quiet) as progress:
        if explained:
            found = lake.explain(run=run, progress=progress, **selection)
            write_explained(found, output, everything=everything, with_report=True)
            click.get_current_context().exit(found.report.exit_code)
        report = lake.replay(run=run, progress=progress, **selection)
    write_report(report, output, everything=everything)
    click.get_current_context().exit(report.exit_code)


def _show_what_if(
    source: Source, output: Output, changes: dict[str, Any], selection: dict[str, Any]
) -> None:
    _refuse(("reward", "require_stages", "allow_partial"), selection, "--set")
    selection.pop("closure")
    with source.open(output) as lake, ProgressBar("Recomputing", quiet=output.quiet) as progress:
        found = lake.what_if(changes, progress=progress, **selection)
    write_what_if(found, output)
    click.get_current_context().exit(3 if found.refused else 0)


def _refuse(names: tuple[str, ...], selection: dict[str, Any], other: str) -> None:
    """Take options out that cannot go with another one, if they are not given."""
    for name in names:
        if selection.pop(name) not in (None, False):
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is part of a verdict, and {other} takes none.")

"""`trajreplay mismatch`: how far the trainer's log-probs are from the sampler's."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from trajreplay.cli.options.shared import ATTEMPT, lake_option, output_options, several
from trajreplay.cli.options.types import Size, StepIdentity
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.shown.mismatch_text import group_text, run_text
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.progress import ProgressBar

_NOT_OF_ROUTES = {"by": "--by", "cap": "--cap", "level": "--level", "everything": "--all"}
_GROUPS = ("run", "rollout", "step", "rank", "weight_version", "position", "length")


class GroupNames(click.ParamType[tuple[str, ...]]):
    """Names of groups with commas between them."""

    name = "NAMES"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        """Refuse a name that is none, and list those that are."""
        if isinstance(value, tuple):
            return value
        names = tuple(one.strip() for one in value.split(",") if one.strip())
        for one in names:
            if one not in _GROUPS:
                self.fail(f"{one!r} is no group, expected some of {','.join(_GROUPS)}", param, ctx)
        return names


@click.command(
    cls=Verb,
    exit_codes={
        0: "Measured; the statistics mean what they say.",
        1: "A finding is an error: equal columns, values that are not finite, other temperatures.",
        3: "One column is said to be a copy of the other, or data is broken.",
    },
    example="trajreplay mismatch --run r3-off --run r3-on",
)
@lake_option
@click.option(
    "--where",
    metavar="SQL",
    help="Only samples for which this boolean expression over the columns of rollouts and steps "
    "holds. Default: all.",
)
@several("--run", "runs", str, "ID", "this run; the first is what the others are compared with")
@ATTEMPT
@several(
    "--rollout",
    "rollouts",
    click.IntRange(min=0),
    "R",
    "this rollout and its steps; excludes --step",
)
@several("--step", "steps", StepIdentity(), "R:S", "step S of rollout R; excludes --rollout")
@several("--rank", "ranks", click.IntRange(min=0), "N", "samples captured by this rank")
@several("--sample", "samples", str, "ID", "this sample")
@several("--group", "groups", str, "ID", "the samples of this group")
@several("--batch", "batches", str, "ID", "this micro-batch, such as mb-0007; needs --step")
@click.option(
    "--by",
    type=GroupNames(),
    default="run",
    show_default=True,
    help=f"One row for each of these, of every run: some of {','.join(_GROUPS)}. Positions and "
    "lengths are told apart in powers of two, from 256 tokens on.",
)
@click.option(
    "--pair",
    metavar="TRAINER:SAMPLER",
    default="old_log_probs:rollout_log_probs",
    show_default=True,
    help="The two columns that are compared.",
)
@click.option(
    "--level",
    type=click.Choice(["step", "rollout"]),
    help="Read steps, as consumed, or rollouts. Default: steps, where they or their rollouts hold "
    "the pair.",
)
@click.option(
    "--over",
    "thresholds",
    type=click.FloatRange(min=0),
    multiple=True,
    metavar="NATS",
    default=(0.5, 1.0),
    show_default=True,
    help="Count tokens whose log-probs differ by more. May be given several times.",
)
@click.option(
    "--cap",
    type=click.FloatRange(min=1),
    default=2.0,
    show_default=True,
    help="Importance ratio at which truncated statistics truncate.",
)
@click.option(
    "--any-version",
    is_flag=True,
    help="Count tokens, too, that are known to be sampled by other weights than those that "
    "recomputed them. Default: leave them out.",
)
@click.option(
    "--allow-partial",
    is_flag=True,
    help="Read cohorts of which ranks are missing, too. Default: leave them out.",
)
@click.option(
    "--memory",
    "memory_bytes",
    type=Size(),
    default="2GiB",
    show_default=True,
    help="Memory that DuckDB may take before it spills, in bytes or with a unit.",
)
@click.option(
    "--routes",
    is_flag=True,
    help="Hold the experts that the sampler chose against the trainer's instead, layer by layer, "
    "with the difference of log-probs where they agree and where they differ. Default: no.",
)
@click.option("--all", "everything", is_flag=True, help="Show every statistic. Default: the main.")
@output_options
def mismatch(
    lake_path: str,
    output: Output,
    by: tuple[str, ...],
    routes: bool,
    everything: bool,
    **options: Any,
) -> None:
    """Measure how far the trainer's log-probs are from the sampler's, run beside run.

    KL estimates, quantiles and counts of the difference of each token, importance ratios,
    perplexities. A mean is unweighted over the means of the steps; beside it stands the mean over
    all tokens. Several runs come with their ratio to the first and its 95 % bootstrap interval
    over steps.

    Of a mixture of experts whose choices were captured, --routes says by layer how many tokens
    have the same experts on both sides, and whether those that have not carry the tail.
    """
    from trajreplay.lake import Lake

    if options["steps"] and options["rollouts"]:
        raise click.UsageError(
            "--step R:S names the rollout already: give it or --rollout, not both."
        )
    if routes:
        _routes(lake_path, output, options)
    with ProgressBar("Measuring", quiet=output.quiet) as progress:
        report = Lake.open(lake_path).mismatch(by=by, progress=progress, **options)
    everything = everything or output.verbose
    if output.format == "json":
        output.document(report.to_json())
    elif output.is_text:
        text = run_text if set(by) <= {"run"} else group_text
        output.text(text(report, everything=everything))
    else:
        for finding in report.findings:
            output.note(f"{finding.severity}: run {finding.run_id}: {finding.message}")
        output.rows(report.table)
    click.get_current_context().exit(0 if report.ok else 1)


def _routes(lake_path: str, output: Output, options: dict[str, Any]) -> None:
    """Measure the agreement of routes, and exit."""
    from trajreplay.cli.shown.agreement_text import agreement_text
    from trajreplay.lake import Lake

    context = click.get_current_context()
    for name, option in _NOT_OF_ROUTES.items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"--routes has no {option}: leave it out.")
    thresholds = options.pop("thresholds")
    stated = context.get_parameter_source("thresholds") is not ParameterSource.DEFAULT
    if stated and len(thresholds) > 1:
        raise click.UsageError("--routes counts tokens over one number of nats: give one --over.")
    for name in ("cap", "level"):
        del options[name]
    with ProgressBar("Measuring", quiet=output.quiet) as progress:
        report = Lake.open(lake_path).route_agreement(
            threshold=thresholds[0], progress=progress, **options
        )
    if output.format == "json":
        output.document(report.to_json())
    elif output.is_text:
        output.text(agreement_text(report))
    else:
        for finding in report.findings:
            output.note(f"{finding.severity}: run {finding.run_id}: {finding.message}")
        output.rows(report.table)
    context.exit(0 if report.ok else 1)

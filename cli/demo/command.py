"""`trajreplay demo`: a real training with a fault in it, and the fault found."""

from __future__ import annotations

from pathlib import Path

import click

from trajreplay.cli.demo.config import TrainingConfig
from trajreplay.cli.demo.faults import DEFAULT_FAULT, FAULTS
from trajreplay.cli.options.shared import Session, quiet_options
from trajreplay.cli.options.types import Named
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.progress import ProgressBar
from trajreplay.cli.terminal.text import printable

MIN_ROLLOUTS = 3


@click.command(
    cls=Verb,
    exit_codes={
        0: "The replay found exactly the injected fault; the lake is there to explore.",
        1: "It found anything else.",
    },
    example="trajreplay demo --fault mask-shift",
)
@click.option(
    "--lake",
    "named",
    type=Named(),
    metavar="PATH",
    help="Folder of the new lake. Default: TRAJREPLAY_LAKE, else ./demo-lake.",
)
@click.option(
    "--fault",
    type=click.Choice(list(FAULTS)),
    default=DEFAULT_FAULT,
    show_default=True,
    help="The mistake that the trainer makes, from a third of the rollouts on.",
)
@click.option(
    "--rollouts",
    type=click.IntRange(min=MIN_ROLLOUTS),
    default=TrainingConfig.rollouts,
    show_default=True,
    metavar="N",
    help="Rounds of sampling; about 3 to 4 optimizer steps each.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=(1 << 32) - 1),
    default=TrainingConfig.seed,
    show_default=True,
    metavar="N",
    help="Start of all randomness: the same seed gives the same training.",
)
@click.option("-f", "--force", is_flag=True, help="Delete the lake that is there. Default: refuse.")
@quiet_options
@click.pass_context
def demo(
    ctx: click.Context,
    named: str | None,
    fault: str,
    rollouts: int,
    seed: int,
    force: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Train a tiny policy on two ranks, capture it, replay it, and find the fault put into it."""
    from trajreplay.cli.demo.run import run_demo

    session = ctx.find_object(Session)
    lake_path = Path(named or (session and session.lake) or "demo-lake")
    config = TrainingConfig(rollouts=rollouts, seed=seed, fault=fault)
    with ProgressBar("Training", quiet=quiet) as progress:
        outcome = run_demo(config, lake_path, force=force, progress=progress)
    for line in outcome.describe():
        click.echo(printable(line))
    ctx.exit(0 if outcome.is_expected else 1)

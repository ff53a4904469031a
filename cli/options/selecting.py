"""Options that select cohorts and samples, shared by the verbs that recompute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from trajreplay.cli.options.shared import ATTEMPT, RUN, several
from trajreplay.cli.options.types import Size, StageName, StepIdentity

Command = TypeVar("Command", bound=Callable[..., Any])

MEMORY = click.option(
    "--memory",
    "memory_bytes",
    type=Size(),
    default="2GiB",
    show_default=True,
    help="Memory that the replay may take, in bytes or with a unit.",
)


def selection_options(command: Command) -> Command:
    """Add `--where`, `--run` and the other options that select.

    The command gets `where`, `run`, `attempt`, `rollouts`, `steps`, `ranks`, `samples`, `groups`,
    `batches` and `stages`.
    """
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_selection(selection: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: They do.
    """
    if selection["steps"] and selection["rollouts"]:
        raise click.UsageError(
            "--step R:S names the rollout already: give it or --rollout, not both."
        )
    if selection["batches"] and not selection["steps"]:
        raise click.UsageError(
            "--batch needs --step R:S: micro-batches are numbered anew in every step."
        )


_OPTIONS: tuple[Callable[..., Any], ...] = (
    click.option(
        "--where",
        metavar="SQL",
        help="Only samples for which this boolean expression over the columns of rollouts and "
        "steps holds. Default: all.",
    ),
    RUN,
    ATTEMPT,
    several(
        "--rollout",
        "rollouts",
        click.IntRange(min=0),
        "R",
        "this rollout and its steps; excludes --step",
    ),
    several("--step", "steps", StepIdentity(), "R:S", "step S of rollout R; excludes --rollout"),
    several("--rank", "ranks", click.IntRange(min=0), "N", "samples captured by this rank"),
    several("--sample", "samples", str, "ID", "this sample"),
    several("--group", "groups", str, "ID", "the samples of this group"),
    several("--batch", "batches", str, "ID", "this micro-batch, such as mb-0007; needs --step"),
    several("--stage", "stages", StageName(), "STAGE", "this stage"),
)

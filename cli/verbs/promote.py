"""`trajreplay promote`: bring what a training left in its spool into the lake."""

from __future__ import annotations

import os

import click

from trajreplay.cli.options.shared import Session, quiet_options
from trajreplay.cli.options.types import Named
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.text import counted, printable

_WAIT_S = 10.0  # for another process that is at it


@click.command(
    cls=Verb,
    exit_codes={
        0: "All that was in the spool is in the lake.",
        1: "",
        3: "Something stays in the spool, or one of the two cannot be read or written.",
    },
    example="trajreplay promote /local/spool",
)
@click.argument(
    "folder",
    type=Named(),
    metavar="FOLDER",
    help="What TRAJREPLAY_CAPTURE_SPOOL was set to.",
)
@click.option(
    "--lake",
    "named",
    type=Named(),
    metavar="PATH",
    help="The lake, where it lies elsewhere now. Default: the one that the spool was made for.",
)
@click.option("-n", "--dry-run", is_flag=True, help="Say what waits. Default: and promote it.")
@quiet_options
@click.pass_context
def promote(
    ctx: click.Context, folder: str, named: str | None, dry_run: bool, quiet: bool, verbose: bool
) -> None:
    """Bring what a training left in its spool into the lake.

    A training does so itself while it runs and when it ends; this is for what it left when it was
    killed, or when the lake was away. Done again, it goes on where it stopped.
    """
    from trajreplay.capture.writing.spool import promoted, target_of, waiting

    lake = named or target_of(folder)
    session = ctx.find_object(Session)
    if not named and session and session.lake and _plain(session.lake) != _plain(lake):
        raise click.UsageError(
            f"the spool is of {lake!r}, and the lake in use is {session.lake!r}: name one with "
            "--lake after the verb."
        )
    if dry_run:
        count = len(waiting(folder))
        click.echo(f"{counted(count, 'capture')} for {printable(lake)}")
        return
    found = promoted(folder, lake, wait_s=_WAIT_S)
    there = f", {found.known} were there" if found.known else ""
    click.echo(f"{counted(found.captures, 'capture')} in {counted(found.files, 'file')}{there}")
    for problem in found.problems:
        click.echo(f"Stays in the spool: {printable(problem.message)}", err=True)
        if problem.hint and not quiet:
            click.echo(f"Hint: {printable(problem.hint)}", err=True)
    ctx.exit(3 if found.problems else 0)


def _plain(lake: str) -> str:
    return lake if "://" in lake else os.path.realpath(lake)

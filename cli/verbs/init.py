"""`trajreplay init`: make a new lake."""

from __future__ import annotations

import click

from trajreplay.cli.options.shared import Session, quiet_options
from trajreplay.cli.options.types import Named
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.text import printable


@click.command(
    cls=Verb,
    exit_codes={0: "The lake is there.", 1: ""},
    example="trajreplay init runs/lake",
)
@click.argument(
    "path",
    required=False,
    type=Named(),
    metavar="[PATH]",
    help="Folder to make a lake, or an address such as s3://bucket/prefix. Default: --lake, else "
    "TRAJREPLAY_LAKE, else ./lake.",
)
@click.option("--lake", "named", type=Named(), metavar="PATH", help="The same as PATH.")
@quiet_options
@click.pass_context
def init(
    ctx: click.Context, path: str | None, named: str | None, quiet: bool, verbose: bool
) -> None:
    """Make a new, empty lake."""
    from trajreplay.lake import Lake

    if path and named and path != named:
        raise click.UsageError(f"PATH is {path!r} and --lake is {named!r}: give one of the two.")
    session = ctx.find_object(Session)
    target = path or named or (session and session.lake) or "lake"
    Lake.create(target)
    if not quiet:
        click.echo(f"A lake is ready in {printable(target)}", err=True)

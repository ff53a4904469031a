"""Options that verbs share: the lake, the selection, and where results go and how they look."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from trajreplay.cli.options.types import Named, Place
from trajreplay.cli.terminal.output import FORMATS, Output
from trajreplay.cli.terminal.sink import check_place

LAKE_FILE = "lake.json"
LAKE_HELP = (
    "Folder of the lake, or its address such as s3://bucket/prefix; before or after the verb. "
    "Default: TRAJREPLAY_LAKE, else the nearest folder upward that is a lake, else ./lake."
)

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass
class Session:
    """What holds for a whole run of the command line.

    Args:
        lake: `--lake` as given before the verb, or TRAJREPLAY_LAKE.
        named: The lake that the verb names, else `lake`.
        verbose: Whether unexpected errors show where they came from.
    """

    lake: str | None = None
    named: str | None = None
    verbose: bool = False


def find_lake(named: str | None) -> str:
    """Where the lake is: the path or address named, else the nearest one upward, else ./lake.

    Args:
        named: What the verb names; what stands before it, or the environment, counts after that.

    Raises:
        DatasetError: None was named, and none is there.
    """
    context = click.get_current_context(silent=True)
    session = context.find_object(Session) if context else None
    if session:
        named = session.named = named or session.lake
    if named:
        return named
    here = Path.cwd()
    for folder in (here, *here.parents, Path("lake")):
        if os.path.isfile(folder / LAKE_FILE):  # noqa: PTH113 - a folder that is closed has none
            return str(folder)
    from trajreplay.schema import DatasetError

    raise DatasetError(
        f"no lake found: looked for {LAKE_FILE} in {here} and the folders above it, and in ./lake",
        hint="Name one with --lake PATH or TRAJREPLAY_LAKE, or make one: trajreplay init",
    )


def lake_option(command: Command) -> Command:
    """Add `--lake`; the command gets the resolved path as `lake_path`."""

    @click.option("--lake", "named", type=Named(), metavar="PATH", help=LAKE_HELP)
    @functools.wraps(command)
    def with_lake(*args: Any, named: str | None, **values: Any) -> Any:
        return command(*args, lake_path=find_lake(named), **values)

    return cast(Command, with_lake)


def quiet_options(command: Command) -> Command:
    """Add `-q` and `-v`; the command gets `quiet` and `verbose`."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        session = ctx.find_object(Session)
        if session:
            session.verbose = session.verbose or value
        return value

    command = click.option(
        "-v",
        "--verbose",
        is_flag=True,
        callback=remember,
        is_eager=True,
        help="Show more, and where an unexpected error came from.",
    )(command)
    return click.option(
        "-q", "--quiet", is_flag=True, help="No notes and no progress on stderr; errors remain."
    )(command)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--format`, `-o`, `-q` and `-v`; the command gets one `Output` as `output`."""

    @click.option(
        "--format",
        "format_name",
        type=click.Choice(FORMATS),
        help="How results are written. Default: by the ending of -o, else table.",
    )
    @click.option(
        "-o",
        "--output",
        "path",
        type=Place(dir_okay=False, writable=True),
        help="Write to this file, whole or not at all. Default: stdout.",
    )
    @quiet_options
    @functools.wraps(command)
    def with_output(
        *args: Any,
        format_name: str | None,
        path: Path | None,
        quiet: bool,
        verbose: bool,
        **values: Any,
    ) -> Any:
        if path is not None:
            check_place(path)
        ending = path.suffix[1:].lower() if path else ""
        name = format_name or (ending if ending in FORMATS else "table")
        output = Output(name, path, quiet=quiet, verbose=verbose)
        return command(*args, output=output, **values)

    return with_output


def several(flag: str, name: str, kind: Any, metavar: str, what: str) -> Callable[..., Any]:
    """An option that restricts a selection to some values and may be given several times.

    Args:
        flag: Its flag.
        name: The parameter that the command gets, a tuple.
        kind: Type of one value.
        metavar: How the help shows a value.
        what: What is selected, as the help goes on after "Only".
    """
    return click.option(
        flag,
        name,
        type=kind,
        multiple=True,
        metavar=metavar,
        help=f"Only {what}. May be given several times. Default: all.",
    )


RUN = click.option("--run", metavar="ID", help="Only this run. Default: every run of the lake.")
ATTEMPT = click.option(
    "--attempt",
    type=click.IntRange(min=0),
    metavar="N",
    help="Only this attempt of it. Default: the newest and what it was resumed from.",
)

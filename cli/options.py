"""Options that verbs share: the lake, the selection, and where results go and how they look."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from trajreplay.cli.output import FORMATS, Output

LAKE_FILE = "lake.json"
LAKE_HELP = (
    "Folder of the lake, or its address such as s3://bucket/prefix; before or after the verb. "
    "Default: TRAJREPLAY_LAKE, else the nearest folder upward that is a lake, else ./lake."
)
_MOST_BYTES = 1 << 50
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

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

    @click.option("--lake", "named", metavar="PATH", help=LAKE_HELP)
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
        type=click.Path(dir_okay=False, writable=True, path_type=Path),
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
        if path is not None and not path.absolute().parent.is_dir():
            raise click.BadParameter(
                f"the folder {str(path.parent)!r} does not exist", param_hint="'-o'"
            )
        ending = path.suffix[1:].lower() if path else ""
        name = format_name or (ending if ending in FORMATS else "table")
        output = Output(name, path, quiet=quiet, verbose=verbose)
        return command(*args, output=output, **values)

    return with_output


class StepIdentity(click.ParamType[tuple[int, int]]):
    """`R:S`, an optimizer step by its rollout and its number inside the rollout."""

    name = "R:S"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Read the two numbers."""
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", value)
        if not found:
            self.fail(f"{value!r} is no step, expected ROLLOUT:STEP such as 120:0", param, ctx)
        return int(found[1]), int(found[2])


class Size(click.ParamType[int]):
    """A number of bytes such as `2GiB`, `500MB` or `1000000`."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number and its unit: GiB and G are 1024 ** 3 bytes, GB is 1000 ** 3."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(?i)([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(|B|iB)", value)
        size = 0
        if found:
            base = 1000 if found[3].lower() == "b" else 1024
            size = int(Decimal(found[1]) * base ** _POWERS[found[2].upper()])
        if size <= 0:
            self.fail(f"{value!r} is no size, expected a number such as 2GiB or 500MiB", param, ctx)
        if size > _MOST_BYTES:
            self.fail(f"{value!r} is too large, expected at most 1024TiB", param, ctx)
        return size


class RewardName(click.ParamType[str]):
    """A reward function: `module:function`, or the name of an entry point."""

    name = "FUNCTION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what cannot be imported; the current folder is searched as by `python -m`."""
        from trajreplay.schema import TrajReplayError
        from trajreplay.stages.plugins import load_reward

        here = str(Path.cwd())
        if ":" in value and here not in sys.path:
            sys.path.insert(0, here)
        try:
            load_reward(value)
        except TrajReplayError as error:
            self.fail(f"{error.message}. {error.hint}".rstrip(), param, ctx)
        return str(value)


class SettingChange(click.ParamType[tuple[str, Any]]):
    """`section.field=value`, a setting that is another."""

    name = "NAME=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """Read name and value, and refuse a setting or a value that there is not."""
        from trajreplay.schema import SchemaError
        from trajreplay.schema.settings.words import setting_of

        if isinstance(value, tuple):
            return value
        try:
            return setting_of(value)
        except SchemaError as error:
            self.fail(f"{error.message}. {error.hint}".rstrip(), param, ctx)


class RedactionRule(click.ParamType[tuple[str, str]]):
    """`FIELD=RULE`, what may be kept of a text field."""

    name = "FIELD=RULE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Refuse a field or rule that is none."""
        from trajreplay.schema import Redaction, SchemaError

        if isinstance(value, tuple):
            return value
        field, _, rule = value.partition("=")
        try:
            Redaction({field: rule})
        except SchemaError as error:
            self.fail(error.message, param, ctx)
        return field, rule


class ProfileName(click.ParamType[str]):
    """The settings of a framework, by `name` or `name@version`."""

    name = "PROFILE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse a name that is none, and list those that are."""
        from trajreplay.schema import SchemaError, profile

        try:
            return profile(value).label
        except SchemaError as error:
            self.fail(error.message, param, ctx)


class ImportKind(click.ParamType[str]):
    """What a file of another tool is."""

    name = "KIND"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse a name that is none, and list those that are."""
        from trajreplay.capture.importers import kinds

        if value not in (there := kinds()):
            self.fail(f"unknown kind {value!r}, expected one of {', '.join(there)}", param, ctx)
        return str(value)


class StageName(click.ParamType[str]):
    """The name of a stage."""

    name = "STAGE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse a name that is none, and list those that are."""
        from trajreplay.schema import STAGES

        names = [stage.name for stage in STAGES]
        if value not in names:
            self.fail(f"unknown stage {value!r}, expected one of {', '.join(names)}", param, ctx)
        return str(value)


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

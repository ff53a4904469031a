"""Options by which a user says of files what they do not say themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import click

from trajreplay.cli.options.types import ProfileName, SettingChange

Command = TypeVar("Command", bound=Callable[..., Any])

_DEFAULTS = {"ids": "rank"}  # of all others nothing
IDS = click.option(
    "--ids",
    type=click.Choice(["rank", "global"]),
    default=_DEFAULTS["ids"],
    show_default=True,
    help="What the sample, group and micro-batch ids of a bundle are local to: their rank, so that "
    "s-0 of rank 1 becomes rank-1/s-0; or nothing, where a group lies on several ranks.",
)
_ALLOW_NUMPY = click.option(
    "--allow-numpy",
    is_flag=True,
    help="Take numbers and arrays of numpy from files of torch.save; nothing else, and nothing in "
    "them is run. Default: refuse them.",
)
_GROUP_BY_POSITION = click.option(
    "--group-by-position",
    type=click.IntRange(min=1),
    metavar="N",
    help="Where files record no groups, take N samples in their order as one; the captures say "
    "so. Default: groups are unknown, and no stage is recomputed that needs them.",
)
_PROFILE = click.option(
    "--profile",
    type=ProfileName(),
    metavar="NAME",
    help="Framework whose settings made the files, for those that do not record any; to list them: "
    "trajreplay profiles. The captures say so. Default: their stages can only be looked at.",
)
_STATE = click.option(
    "--state",
    type=SettingChange(),
    multiple=True,
    metavar="NAME=VALUE",
    help="A setting that was another than the profile's, such as reward.n_samples_per_prompt=8. "
    "May be given several times. Default: as the profile has it.",
)
_NAMES = ("ids", "allow_numpy", "group_by_position", "profile")


def statement_options(command: Command) -> Command:
    """Add what is said of files; the command gets it as `statements`, named as ImportOptions is."""

    @IDS
    @_ALLOW_NUMPY
    @_GROUP_BY_POSITION
    @_PROFILE
    @_STATE
    @functools.wraps(command)
    def with_statements(*args: Any, **values: Any) -> Any:
        said = {name: values.pop(name) for name in _NAMES}
        said["changes"] = dict(values.pop("state"))
        if said["changes"] and said["profile"] is None:
            raise click.UsageError("--state changes a setting of a profile: give --profile NAME.")
        return command(*args, statements=said, **values)

    return cast(Command, with_statements)


def given_flags(statements: Mapping[str, Any]) -> list[str]:
    """The options among `statements` that were given, or are not what they are by default."""
    names = [one for one, value in statements.items() if value and value != _DEFAULTS.get(one)]
    return ["--state" if one == "changes" else f"--{one.replace('_', '-')}" for one in names]

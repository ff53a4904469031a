"""Values of options that are more than a text or a number: read, or refused by name."""

from __future__ import annotations

import re
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

_MOST_BYTES = 1 << 50
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


_EMPTY = "is empty; is a variable of the shell not set?"


class Place(click.Path):
    """A path on this machine, as a `Path`; an empty text is none, and no name of this folder."""

    def __init__(self, **kept: bool) -> None:
        super().__init__(path_type=Path, **kept)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what is empty, not there or of another kind."""
        if value == "":
            self.fail(_EMPTY, param, ctx)
        return super().convert(value, param, ctx)


class Named(click.ParamType[str]):
    """The name of something that has one: a lake, a policy, a folder."""

    name = "TEXT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what is empty: another would be taken in its place."""
        if value == "":
            self.fail(_EMPTY, param, ctx)
        return str(value)


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

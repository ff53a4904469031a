"""`trajreplay profiles`: the settings of each framework, and where two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output

if TYPE_CHECKING:
    from trajreplay.schema import Settings

_USE = "Give nothing, one profile, or `diff` and two profiles."


@click.command(
    cls=Verb,
    exit_codes={1: "", 2: "There is no such profile.", 3: ""},
    example="trajreplay profiles diff verl trl",
)
@click.argument(
    "words",
    nargs=-1,
    metavar="[NAME | diff A B]",
    help="A profile to show in full, or two to compare. Default: a line for each.",
)
@output_options
def profiles(words: tuple[str, ...], output: Output) -> None:
    """List the profiles of the frameworks, show one, or compare two.

    A difference comes with a number of a worked example of five samples: what the first profile
    makes of it, and what it does with this one field as the second has it.
    """
    import pyarrow as pa

    if not words:
        rows = profile_rows()
    elif len(words) == 1 and words[0] != "diff":
        rows = _shown(words[0])
    elif len(words) == 3 and words[0] == "diff":
        rows = _compared(words[1], words[2])
    else:
        raise click.UsageError(f"found {' '.join(words)!r}. {_USE}")
    if not rows:
        output.note("They do not differ.")
        if output.format == "table":
            return
    elif words[:1] == ("diff",) and output.format == "table":
        output.note(
            f"number: a worked example under {words[1]}; changed: with this field of {words[2]}"
        )
    output.rows(pa.Table.from_pylist(rows), cell_width=None)


def profile_rows() -> list[dict[str, Any]]:
    """Each profile with what is peculiar about it."""
    from trajreplay.schema import PROFILES

    return [{"profile": one.label, "doc": one.doc} for one in PROFILES.values()]


def _shown(name: str) -> list[dict[str, Any]]:
    from trajreplay.schema import Settings
    from trajreplay.schema.settings import SECTIONS
    from trajreplay.schema.settings.knobs import kinds

    settings = profile_settings(name)
    plain = Settings()
    return [
        {
            "setting": f"{section}.{field}",
            "value": _text(getattr(getattr(settings, section), field)),
            "default": _text(getattr(getattr(plain, section), field)),
        }
        for section, kind in SECTIONS.items()
        for field in kinds(kind)
    ]


def _compared(left: str, right: str) -> list[dict[str, Any]]:
    from trajreplay.schema import with_changes
    from trajreplay.schema.settings import differences
    from trajreplay.stages.compose.example import worked_number

    own, theirs = profile_settings(left), profile_settings(right)
    found = differences(own, theirs)
    rows = []
    for name, (one, other) in found.items():
        section = name.partition(".")[0]
        mine = own
        if name != "reward.lone":  # which alone may make the example NaN
            mine = with_changes(own, {"reward.lone": "zero"})
        # Alone a correction lacks its bounds, or a KL in the reward its estimator.
        others = {label: pair[1] for label, pair in found.items() if label != "reward.lone"}
        attempts = ({name: other}, {**others, name: other})
        numbers = (worked_number(with_changes(mine, one), section) for one in attempts)
        changed = next((one for one in numbers if one is not None), None)
        row = {"setting": name, left: _text(one), right: _text(other)}
        rows.append(row | {"number": worked_number(mine, section), "changed": changed})
    return rows


def profile_settings(name: str) -> Settings:
    """The settings of a profile named on the command line."""
    from trajreplay.schema import SchemaError, profile

    try:
        return profile(name).settings
    except SchemaError as error:
        raise click.BadParameter(f"{error.message}. {error.hint}", param_hint="'NAME'") from error


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_text(one)}" for name, one in value.items()) or "-"
    if isinstance(value, tuple) and all(isinstance(one, str) for one in value):
        return ", ".join(value) or "-"
    return f"{value[0]:g} to {value[1]:g}" if isinstance(value, tuple) else str(value)

"""Changes of settings as a person writes them: `section.field=value`."""

from __future__ import annotations

import difflib
from typing import Any

from trajreplay.schema.errors import SchemaError
from trajreplay.schema.settings.knobs import Kind, kinds
from trajreplay.schema.settings.tree import SECTIONS

_NOTHING = ("none", "null", "off", "")
_BY_NAME = {"weights": "number", "intervals": "interval"}  # what each name has


def setting_of(text: str) -> tuple[str, Any]:
    """Read one change.

    Args:
        text: `section.field=value`. An interval is `low,high`; `none` stands for not stated.
            Several weights or intervals are `name:value;name:value`, several names `one,other`.

    Raises:
        SchemaError: There is no such setting, or its value is of another kind.

    >>> setting_of("loss.eps_clip_high=0.28"), setting_of("reward.clip_after=-5,5")
    (('loss.eps_clip_high', 0.28), ('reward.clip_after', (-5.0, 5.0)))
    """
    label, equals, value = text.partition("=")
    label = label.strip()
    section, _, name = label.partition(".")
    known = kinds(SECTIONS[section]) if section in SECTIONS else {}
    if not equals or name not in known:
        every = [f"{one}.{field}" for one, kind in SECTIONS.items() for field in kinds(kind)]
        near = difflib.get_close_matches(label, every, 3, 0.5)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        found = f"no setting {label!r}" if equals else f"{text!r} has no ="
        raise SchemaError(
            f"{found}, expected section.field=value",
            hint=f"{hint}To list all with their values: trajreplay capability",
        )
    kind = known[name]
    try:
        read = _value(kind, value.strip())
    except ValueError:
        read = value
    if not kind.accepts(read) or kind.unknown(read):
        expected = ", ".join(kind.known) or kind.expected
        expected += ", or none" if kind.optional else ""
        raise SchemaError(f"{label} is {value.strip()!r}, expected {expected}")
    return label, read


def _value(kind: Kind, text: str) -> Any:
    if kind.optional and text.lower() in _NOTHING:
        return None
    if kind.what == "flag":
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind.what == "number":
        return float(text)
    if kind.what == "count":
        return int(text)
    if kind.what == "interval":
        low, _, high = text.strip("()[]").partition(",")
        return float(low), float(high)
    if kind.what == "names":
        return tuple(filter(None, map(str.strip, text.split(","))))
    if kind.what in _BY_NAME:
        parts = (one.partition(":") for one in text.split(";") if one.strip())
        one = Kind(_BY_NAME[kind.what])
        return {name.strip(): _value(one, value.strip()) for name, _, value in parts}
    return text

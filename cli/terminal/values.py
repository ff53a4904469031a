"""Values as JSON and as CSV: floats exact, non-finite ones as words, control characters escaped."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from trajreplay.cli.terminal.text import interval, is_unsafe, printable

_NEEDS_QUOTES = re.compile(r'[",\n]|^$|^\s|\s$')


def plain(value: Any) -> Any:
    """A value as JSON has it.

    >>> plain({"loss": [1.5, float("nan")]})
    {'loss': [1.5, 'NaN']}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if hasattr(value, "nanoseconds"):
        return interval(value)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, Decimal):
        if value == value.to_integral_value():
            return int(value)
        nearest = float(value)
        return nearest if Decimal(repr(nearest)) == value else str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def json_text(value: Any, *, indent: int | None = None) -> str:
    r"""A value as JSON text; whatever a terminal would obey is escaped, and nothing is lost.

    >>> json_text({"sample_id": "s\x9b-漢"})
    '{"sample_id": "s\\u009b-漢"}'
    """
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=indent)
    if text.isascii() and "\x7f" not in text:
        return text
    # json escapes what is below a space; line breaks are then only those of the indentation.
    return "".join(f"\\u{ord(one):04x}" if one != "\n" and is_unsafe(one) else one for one in text)


def csv_line(values: Iterable[Any]) -> str:
    r"""Values as one line of CSV; null is empty, an empty text is quoted, a list is JSON.

    >>> csv_line([1, None, "", "a,b", 0.1, [1.0]])
    '1,,"","a,b",0.1,[1.0]\n'
    """
    return ",".join(map(_csv_field, values)) + "\n"


def _csv_field(value: Any) -> str:
    value = plain(value)
    if value is None:
        return ""
    text = printable(value, keep="\n\t") if isinstance(value, str) else json_text(value)
    if _NEEDS_QUOTES.search(text):
        return '"' + text.replace('"', '""') + '"'
    return text

"""Text for terminals: strangers' text made harmless, numbers, cells, aligned columns."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

_UNSAFE_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
# Marks that change the direction of the text around them: a name must not reorder its neighbours.
_DIRECTION_MARKS = {*range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x61C}
CELL_WIDTH = 60
_RANK = re.compile(r"^[/: ]*(rank-\d+)?[/: ]*")  # and what separates it from the rest
_LIST_ITEMS = 4


def is_unsafe(character: str) -> bool:
    """Whether a terminal would obey the character instead of showing it."""
    return (
        unicodedata.category(character) in _UNSAFE_CATEGORIES or ord(character) in _DIRECTION_MARKS
    )


def escaped(character: str) -> str:
    r"""One character as an escape sequence that a reader can see.

    >>> escaped("\x1b")
    '\\x1b'
    """
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable(text: str, *, keep: str = "") -> str:
    r"""Text with control characters, lone surrogates and direction marks written out.

    Args:
        text: Text from a lake, or an error message that quotes some.
        keep: Characters that may stay, such as the line breaks of a message.

    >>> printable("run \x1b[31m")
    'run \\x1b[31m'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(escaped(one) if one not in keep and is_unsafe(one) else one for one in text)


def number(value: float, digits: int = 9) -> str:
    """A float with so many significant digits, always recognisable as one.

    >>> number(-1.0), number(0.1 + 0.2), number(float("nan"))
    ('-1.0', '0.3', 'NaN')
    """
    if math.isfinite(value):
        return repr(float(f"{value:.{digits}g}"))
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def cell(value: Any, limit: int | None = CELL_WIDTH) -> str:
    """A value as one line of at most `limit` characters."""
    text = printable(value) if isinstance(value, str) else _inline(value)
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def _inline(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return number(value, 6)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{printable(str(k))}: {_inline(v)}" for k, v in value.items()) + "}"
    if hasattr(value, "nanoseconds"):
        return interval(value)
    if isinstance(value, list | tuple):
        items = [_inline(one) for one in value[:_LIST_ITEMS]]
        more = len(value) - _LIST_ITEMS
        return f"[{', '.join(items)}{f', … {more} more' if more > 0 else ''}]"
    return printable(str(value))


def interval(value: Any) -> str:
    """A span of months, days and nanoseconds in words that SQL reads.

    >>> from types import SimpleNamespace
    >>> interval(SimpleNamespace(months=14, days=0, nanoseconds=-1_500_000_000))
    '14 months -1.5 seconds'
    """
    sign, rest = "-" if value.nanoseconds < 0 else "", abs(value.nanoseconds)
    seconds = f"{sign}{rest // 10**9}.{rest % 10**9:09}".rstrip("0").rstrip(".")
    parts = {"months": value.months, "days": value.days, "seconds": rest and seconds}
    return " ".join(f"{one} {name}" for name, one in parts.items() if one) or "0 seconds"


def width(text: str) -> int:
    """Columns that a text takes on a terminal.

    >>> width("ab"), width("漢字")
    (2, 4)
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1
        for one in text
    )


def aligned(names: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """Rows under their column names, columns two spaces apart, the same at any terminal width.

    Args:
        names: Column names.
        rows: Cells, as text that is safe to print.
        right: For each column, whether it is a number and stands to the right.
    """
    lines = [list(names), *(list(row) for row in rows)]
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    right = list(right) or [False] * len(names)
    lines.insert(1, ["-" * one for one in widths])
    return "".join(
        "  ".join(
            " " * (size - width(text)) + text if to_right else text + " " * (size - width(text))
            for text, size, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def counted(count: int, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "cohort"), counted(52, "cohort")
    ('1 cohort', '52 cohorts')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def folded(notes: Iterable[tuple[str, str]]) -> list[str]:
    """Notes, each that several sources or ranks share told once.

    Args:
        notes: What each is of, which it may begin with, and the note.
    """
    alike: dict[str, list[tuple[str, str]]] = {}
    for source, note in notes:
        rest = _RANK.sub("", note.removeprefix(source))
        alike.setdefault(rest, []).append((source, note))
    return [_one_of(rest, found) for rest, found in alike.items()]


def _one_of(rest: str, found: list[tuple[str, str]]) -> str:
    """One note for all that say `rest` of what stands before it."""
    sources = {source for source, _ in found}
    if len(found) == 1:
        return found[0][1]
    if len(sources) == 1:
        return f"{sources.pop()}: {len(found)} times: {rest}"
    return f"{len(sources)} alike, the first {found[0][0]}: {rest}"

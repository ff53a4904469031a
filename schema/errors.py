"""The errors that trajreplay raises: where, what was found, what was expected, what to do next."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")


class TrajReplayError(Exception):
    """Base of every error of this package.

    Args:
        message: Where it happened, what was found and what was expected.
        hint: What to do next; printed on a line of its own.
        facts: The same facts as values, readable as `error.facts["rank"]`.
    """

    def __init__(self, message: str, *, hint: str = "", **facts: Any) -> None:
        self.message = message
        self.hint = hint
        self.facts = facts
        super().__init__(f"{message}\n\n{hint}" if hint else message)


class SchemaError(TrajReplayError):
    """A declaration, setting, identifier or type does not hold."""


class DatasetError(TrajReplayError):
    """The lake on disk is missing, broken, incomplete, unsafe or of a newer format."""


class CaptureError(TrajReplayError):
    """What a producer handed over cannot be committed."""


class StageError(TrajReplayError):
    """A stage cannot be recomputed: unsupported arithmetic or missing membership."""


class QueryError(TrajReplayError):
    """A selection, predicate or statement is wrong, or selects nothing."""


def shown(value: object) -> str:
    """A value in a message that a lake may keep: a number as it is, of all else only its type.

    >>> shown((0, 2.5)), shown("the prompt of a person")
    ('(0, 2.5)', 'a str')
    """
    members = value if isinstance(value, tuple) else (value,)
    plain = all(one is None or isinstance(one, (int, float)) for one in members)
    return repr(value) if plain else f"a {type(value).__name__}"


def is_name(text: object) -> bool:
    """Whether it is a name or a word, and no text: ASCII, without spaces, 64 characters at most.

    >>> is_name("loss.policy"), is_name("the prompt of a person")
    (True, False)
    """
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def named(value: object) -> str:
    """A name in a message that a lake may keep; of a text that is none only its length.

    >>> named("s-17"), named("the prompt of a person"), named(3)
    ("'s-17'", 'a text of 22 characters', '3')
    """
    if not isinstance(value, str):
        return shown(value)
    return repr(value) if not value or is_name(value) else f"a text of {len(value)} characters"


def bare(value: object) -> str:
    """As `named`, for the beginning of a sentence: a name is not quoted.

    >>> bare("log_probs"), bare("the prompt of a person")
    ('log_probs', 'a text of 22 characters')
    """
    return str(value) if is_name(value) else named(value)


def listed(problems: Iterable[str], limit: int = 10) -> str:
    """Join problems of one kind, ten of them and then a count of the others."""
    found = list(problems)
    shown = "\n  ".join(found[:limit])
    more = f"\n  and {len(found) - limit} more" if len(found) > limit else ""
    return shown + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about a name that there is not: the nearest of those there are.

    >>> did_you_mean("replya", ["replay", "info"]), did_you_mean("x", ["replay"])
    ("; did you mean 'replay'?", '')
    """
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""

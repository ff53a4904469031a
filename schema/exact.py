"""Values read from JSON, taken only in the exact type that is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Value = TypeVar("_Value")


def typed(value: Any, kind: type[_Value]) -> _Value:
    """A value of exactly this type: True is no integer.

    Raises:
        ValueError: It has another.
    """
    if type(value) is not kind:
        raise ValueError(f"{value!r} is of type {type(value).__name__}, expected {kind.__name__}")
    return value


def text(value: Any) -> str:
    """A string."""
    return typed(value, str)


def array(value: Any) -> list[Any]:
    """A JSON array."""
    return typed(value, list)


def tree(value: Any) -> dict[str, Any]:
    """A JSON object."""
    return typed(value, dict)


def whole(value: Any) -> int:
    """A non-negative integer.

    Raises:
        ValueError: It is none.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no non-negative integer")
    return value


def one_of(value: Any, allowed: tuple[str, ...]) -> str:
    """One of these strings.

    Raises:
        ValueError: It is none of them.
    """
    if type(value) is not str or value not in allowed:
        raise ValueError(f"{value!r}, expected one of {', '.join(allowed)}")
    return value


def optional(value: Any, read: Callable[[Any], _Value]) -> _Value | None:
    """What `read` makes of a value that is not null."""
    return None if value is None else read(value)

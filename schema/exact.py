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


def whole(value: Any, limit: int = 2**63 - 1) -> int:
    """A non-negative integer that a table can hold.

    Raises:
        ValueError: It is none, or above `limit`.
    """
    if type(value) is not int or not 0 <= value <= limit:
        raise ValueError(f"{value!r} is no integer from 0 to {limit}")
    return value


def rank(value: Any) -> int:
    """A rank: an integer that fits 32 bits."""
    return whole(value, 2**31 - 1)


def time_us(value: Any) -> int:
    """Microseconds since 1970, up to the year 9999."""
    return whole(value, 253_402_300_799_999_999)


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

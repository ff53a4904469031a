"""Kinds of settings fields: what a value may be, how it is stored, and which names are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from trajreplay.schema.canonical import read_float
from trajreplay.schema.errors import SchemaError

Interval = tuple[float, float]
_LARGEST = 3.4028234663852886e38


@dataclass(frozen=True)
class Kind:
    """What a field may hold.

    Args:
        what: name, flag, number, count, interval, weights, intervals or names.
        optional: Whether None stands for "off" or "not stated".
        known: The names that some capability can recompute; others are kept and not recomputed.
    """

    what: str
    optional: bool = False
    known: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """What it may hold, in words."""
        return _EXPECTED[self.what]

    def accepts(self, value: object) -> bool:
        """Whether a value is of exactly this kind: 1 is no flag, "0.2" no number."""
        return (value is None and self.optional) or _CHECKS[self.what](value)

    def unknown(self, value: Any) -> tuple[str, ...]:
        """The names in a value that no capability can recompute."""
        if not self.known:
            return ()
        held = tuple(value) if isinstance(value, Mapping) else (value,)
        return tuple(one for one in held if one not in self.known)

    def stored(self, value: Any) -> Any:
        """The value of what JSON holds; floats are stored as exact text.

        Raises:
            ValueError: It holds no such value.
        """
        if self.what == "number" and isinstance(value, str):
            return read_float(value)
        if self.what == "interval" and isinstance(value, list):
            return tuple(map(read_float, value))
        if self.what == "weights" and isinstance(value, Mapping):
            return {str(name): read_float(one) for name, one in value.items()}
        if self.what == "intervals" and isinstance(value, Mapping):
            return {str(name): tuple(map(read_float, one)) for name, one in value.items()}
        if self.what == "names" and isinstance(value, list):
            return tuple(value)
        return value


def _is_number(value: object) -> bool:
    """Whether it is one that float32 can hold: training computes in that."""
    return type(value) in (int, float) and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]


def _is_interval(value: object) -> bool:
    """Bounds may be infinite: one side of an interval is often open."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(type(one) in (int, float) for one in value) and value[0] <= value[1]


def _is_weights(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_number(one) for name, one in value.items()
    )


def _is_intervals(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_interval(one) for name, one in value.items()
    )


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(one, str) and one for one in value)


_EXPECTED = {
    "name": "a name",
    "flag": "true or false",
    "number": "a number that float32 can hold",
    "count": "a non-negative integer",
    "interval": "a pair (low, high)",
    "weights": "an object of numbers",
    "intervals": "an object of pairs (low, high)",
    "names": "a tuple of names",
}
_CHECKS = {
    "name": lambda value: isinstance(value, str) and bool(value),
    "flag": lambda value: isinstance(value, bool),
    "number": _is_number,
    "count": lambda value: type(value) is int and 0 <= value < 2**31,
    "interval": _is_interval,
    "weights": _is_weights,
    "intervals": _is_intervals,
    "names": _is_names,
}


def name(default: str, *others: str) -> Any:
    """A field that holds one of several names, the default first."""
    return _made(default, Kind("name", known=(default, *others)))


def flag(default: bool | None) -> Any:
    """A field that is true or false, or None where its default is: the producer does not say."""
    return _made(default, Kind("flag", optional=default is None))


def number(default: float | None, *, optional: bool = False) -> Any:
    """A field that holds a finite number, or None for none if it may or that is its default."""
    return _made(default, Kind("number", optional=optional or default is None))


def count(default: int | None) -> Any:
    """A field that holds a non-negative integer, or None where its default is."""
    return _made(default, Kind("count", optional=default is None))


def interval(default: Interval | None) -> Any:
    """A field that holds a lower and an upper bound, or None for no bounds."""
    return _made(default, Kind("interval", optional=True))


def weights(*known: str) -> Any:
    """A field that holds numbers by name, none of them by default; in order of the names."""
    return field(default_factory=dict, metadata={"kind": Kind("weights", known=known)})


def intervals(*known: str) -> Any:
    """A field that holds bounds by name, none of them by default; in order of the names."""
    return field(default_factory=dict, metadata={"kind": Kind("intervals", known=known)})


def names() -> Any:
    """A field that holds several names, none of them by default."""
    return _made((), Kind("names"))


def _made(default: Any, kind: Kind) -> Any:
    return field(default=default, metadata={"kind": kind})


_known: dict[type, Mapping[str, Kind]] = {}


def kinds(section: type) -> Mapping[str, Kind]:
    """The kind of each field of a section."""
    if section not in _known:
        found = {one.name: one.metadata["kind"] for one in fields(section)}
        _known[section] = MappingProxyType(found)
    return _known[section]


def check_section(section: object) -> None:
    """Refuse a value of another kind than its field's.

    Raises:
        SchemaError: There is one.
    """
    for label, kind in kinds(type(section)).items():
        value = getattr(section, label)
        if not kind.accepts(value):
            where = f"{type(section).__name__}.{label}"
            raise SchemaError(f"{where} is {value!r}, expected {kind.expected}")

"""One object of a file from anywhere, read field by field in the exact type that is expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from reprlib import Repr
from typing import Any, TypeVar

from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.identity import check_id

_Value = TypeVar("_Value")
_ABSENT = object()
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict = 2, 3, 3


def shown(value: Any) -> str:
    """A value in a message: short, whatever it holds."""
    return _REPR.repr(value)


class Fields:
    """An object of named values.

    Args:
        tree: The values.
        where: Where it is, for messages.
    """

    def __init__(self, tree: Any, where: str) -> None:
        if type(tree) is not dict or not set(map(type, tree)) <= {str}:
            raise DatasetError(
                f"{where}: {shown(tree)}, expected an object with named values", path=where
            )
        self.tree: dict[str, Any] = tree
        self.where = where

    def __contains__(self, name: str) -> bool:
        return self.tree.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def error(self, name: str, found: str, expected: str) -> DatasetError:
        """What to raise of a value."""
        return DatasetError(
            f"{self.where}: {name} {found}, expected {expected}",
            hint="Get the file again from where it was written.",
            path=self.where,
            field=name,
        )

    def get(self, name: str, read: Callable[[Any], _Value], default: Any = _ABSENT) -> _Value:
        """A value as `read` takes it.

        Args:
            name: The field.
            read: Returns the value, or raises a ValueError or SchemaError that says why not.
            default: What a field that is absent or null stands for; without it that is an error.

        Raises:
            DatasetError: It is absent, or not what `read` takes.
        """
        value = self.tree.get(name)
        if value is None:
            if default is _ABSENT:
                raise self.error(name, "is missing", "a value")
            found: _Value = default
            return found
        try:
            return read(value)
        except SchemaError as error:
            raise DatasetError(f"{self.where}: {error.message}", hint=error.hint) from error
        except (ValueError, OverflowError) as error:
            raise self.error(name, f"is {shown(value)}", str(error)) from error

    def object(self, name: str, default: Any = _ABSENT) -> Fields:
        """An object inside."""
        value = self.get(name, lambda one: one, default)
        return Fields(value, f"{self.where}: {name}")

    def objects(self, name: str) -> list[Fields]:
        """A list of objects inside."""
        rows = self.rows(name)
        return [rows.row(row) for row in range(len(rows))]

    def rows(self, name: str) -> Rows:
        """A list of objects inside, to be read field by field."""
        return Rows(self.get(name, _list), f"{self.where}: {name}")

    def items(self) -> Iterator[tuple[str, Fields]]:
        """Every value, as an object."""
        return ((name, self.object(name)) for name in self.tree)

    def unknown(self, known: Collection[str]) -> list[str]:
        """Fields that are not among these."""
        return sorted(set(self.tree) - set(known))

    def refuse_unknown(self, known: Collection[str], why: str) -> None:
        """Refuse fields that are not among these.

        Raises:
            DatasetError: There are some.
        """
        odd = self.unknown(known)
        if odd:
            raise DatasetError(
                f"{self.where}: {', '.join(map(shown, odd[:5]))} is not known, expected "
                f"{', '.join(sorted(known))}: {why}",
                hint="A newer version of trajreplay may know it.",
                path=self.where,
            )


class Rows:
    """A list of objects of the same fields, read field by field.

    Args:
        trees: The objects.
        where: Where the list is, for messages.
    """

    def __init__(self, trees: list[Any], where: str) -> None:
        self._trees, self._where = trees, where
        odd = set(map(type, trees)) - {dict} or set(map(type, self.names())) - {str}
        for row in range(len(trees) if odd else 0):
            self.row(row)

    def __len__(self) -> int:
        return len(self._trees)

    def names(self) -> set[str]:
        """The fields that any of them has."""
        return set().union(*self._trees)

    def row(self, row: int) -> Fields:
        """One of them."""
        return Fields(self._trees[row], f"{self._where}[{row}]")

    def lacking(self, name: str) -> Iterator[int]:
        """Those that do not have a field, null or not."""
        return (row for row, tree in enumerate(self._trees) if name not in tree)

    def get(self, name: str, read: Callable[[Any], _Value], default: Any = _ABSENT) -> list[_Value]:
        """A value of each, as `Fields.get` takes one.

        Raises:
            DatasetError: One is absent, or not what `read` takes.
        """
        values = [tree.get(name) for tree in self._trees]
        try:
            if default is not _ABSENT:
                return [default if value is None else read(value) for value in values]
            return [read(value) for value in values]
        except (SchemaError, ValueError, OverflowError):  # by row, which names it
            rows = range(len(values))
            return [self.row(row).get(name, read, default) for row in rows]


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("a list of objects")
    return value


def text(value: Any) -> str:
    """A string."""
    if type(value) is not str:
        raise ValueError("a string")
    return value


def identifier(value: Any) -> str:
    """A string that may stand as an id."""
    return check_id("the id", text(value))


def count(value: Any) -> int:
    """A non-negative integer that fits 32 bits."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError("an integer from 0 to 2147483647")
    return value


def counts(value: Any) -> list[int]:
    """A list of those."""
    if type(value) is not list:
        raise ValueError("a list of integers")
    return [count(one) for one in value]


def coordinate(value: Any) -> int:
    """A non-negative integer that fits 64 bits."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("an integer from 0 to 2**63 - 1")
    return value


def whole(value: Any) -> int:
    """A whole number, of either sign."""
    if type(value) is not int:
        raise ValueError("a whole number")
    return value


def flag(value: Any) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise ValueError("true or false")
    return value


def number(value: Any) -> float:
    """A number, NaN and infinities among them."""
    if type(value) not in (int, float):
        raise ValueError("a number")
    return float(value)


def finite(value: Any) -> float:
    """A finite number."""
    found = number(value)
    if not math.isfinite(found):
        raise ValueError("a finite number")
    return found


def numbers(value: Any) -> list[float]:
    """A list of numbers."""
    if type(value) is not list or not {type(one) for one in value} <= {int, float}:
        raise ValueError("a list of numbers")
    return [float(one) for one in value]


def integers(value: Any) -> list[int]:
    """A list of integers."""
    if type(value) is not list or not {type(one) for one in value} <= {int}:
        raise ValueError("a list of integers")
    return list(value)


def texts(value: Any) -> list[str]:
    """A list of strings."""
    if type(value) is not list or not {type(one) for one in value} <= {str}:
        raise ValueError("a list of strings")
    return list(value)


def text_map(value: Any) -> Mapping[str, str]:
    """An object of strings."""
    if type(value) is not dict or not all(type(one) is str for one in value.values()):
        raise ValueError("an object of strings")
    return dict(value)

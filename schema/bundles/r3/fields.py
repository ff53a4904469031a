"""The fields of a trace record, each taken with its exact type and within bounds."""

from __future__ import annotations

import re
from typing import Any

from trajreplay.schema.bundles.r3.records import BYTES, TensorRecord

_MAX_INTEGER = 1 << 62
_MAX_PREVIEW = 4096
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


class RecordError(ValueError):
    """A line is no record of a trace.

    Args:
        message: What was found and what was expected.
        is_json: Whether it is a JSON object at least.
        event: The event that it names, where that is not a known one.
    """

    def __init__(self, message: str, *, is_json: bool = True, event: str = "") -> None:
        self.is_json = is_json
        self.event = event
        super().__init__(message)


class Fields:
    """The fields of one object, each taken with its exact type."""

    def __init__(self, tree: dict[str, Any], name: str = "") -> None:
        self._tree = tree
        self._name = f"{name}." if name else ""

    def refuse(self, key: str, expected: str) -> RecordError:
        """The error of a field that is not as expected."""
        if key not in self._tree:
            return RecordError(f"{self._name}{key} is missing, expected {expected}")
        found = repr(self._tree[key])
        shown = found if len(found) <= 60 else f"{found[:57]}..."
        return RecordError(f"{self._name}{key} is {shown}, expected {expected}")

    def text(self, key: str) -> str:
        """A short string."""
        value = self._tree.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= 1024:
            raise self.refuse(key, "a string of 1 to 1024 characters")
        return value

    def number(self, key: str) -> float:
        """A finite number."""
        value = self._tree.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "a number")
        if not abs(value) < _MAX_INTEGER:
            raise self.refuse(key, "a number that a clock can show")
        return float(value)

    def integer(self, key: str, least: int = 0) -> int:
        """A whole number."""
        value = self._tree.get(key)
        if type(value) is not int or not least <= value < _MAX_INTEGER:
            raise self.refuse(key, f"a whole number from {least}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A whole number from 0, or None where it is missing or null."""
        return None if self._tree.get(key) is None else self.integer(key)

    def boolean(self, key: str) -> bool:
        """True or false."""
        value = self._tree.get(key)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def integers(self, key: str, least: int, most: int) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._tree.get(key)
        if not isinstance(value, list) or len(value) > most:
            raise self.refuse(key, f"a list of at most {most} whole numbers")
        if any(type(one) is not int or not least <= one < _MAX_INTEGER for one in value):
            raise self.refuse(key, f"a list of whole numbers from {least}")
        return tuple(value)

    def optional_shape(self, key: str) -> tuple[int, ...] | None:
        """A shape, or None."""
        return None if self._tree.get(key) is None else self.integers(key, 0, 8)

    def optional_tensor(self, key: str, seen: dict[Any, Any]) -> TensorRecord | None:
        """The record of a tensor, or None."""
        return None if self._tree.get(key) is None else self.tensor(key, seen)

    def tensor(self, key: str, seen: dict[Any, Any]) -> TensorRecord:
        """The record of a tensor, whole or the valid part of a row; equal ones are held once."""
        inner = self._tree.get(key)
        if not isinstance(inner, dict):
            raise self.refuse(key, "the record of a tensor")
        get = Fields(inner, f"{self._name}{key}")
        prefix = "valid_" if "valid_sha256" in inner else ""
        dtype = get.text("dtype").removeprefix("torch.")
        if dtype not in BYTES:
            raise get.refuse("dtype", f"one of {', '.join(BYTES)}")
        sha256 = get.text(f"{prefix}sha256")
        if not _SHA256.match(sha256):
            raise get.refuse(f"{prefix}sha256", "64 hexadecimal digits")
        tensor = TensorRecord(
            get.integers(f"{prefix}shape", 0, 8),
            dtype,
            sha256,
            get.integers(f"{prefix}preview", -_MAX_INTEGER, _MAX_PREVIEW),
            get.integers("full_shape", 0, 8) if prefix else None,
        )
        if len(tensor.preview) > tensor.size:
            raise get.refuse(f"{prefix}preview", f"at most the {tensor.size} values of its shape")
        kept: TensorRecord = seen.setdefault(tensor, tensor)
        return kept

"""JSON from anywhere: standard, no key twice, no number that a float cannot hold."""

from __future__ import annotations

import json
import math
from typing import Any

from trajreplay.schema import exact
from trajreplay.schema.bundles.bit_lists import without_bit_lists
from trajreplay.schema.errors import DatasetError


def load_object(
    data: bytes, where: str, *, allow_nan: bool = False, bits: str = ""
) -> dict[str, Any]:
    """Decode one JSON object.

    Args:
        data: UTF-8.
        where: The file, for messages.
        allow_nan: Whether NaN, Infinity and -Infinity are read as Python writes them.
        bits: A name under which lists of 0 and 1 become arrays.

    Raises:
        DatasetError: It is none, has a key twice or holds a number that no float
            can.
    """

    def constant(name: str) -> float:
        if not allow_nan:
            raise ValueError(f"{name} is not standard JSON")
        return float(name)

    def taken(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = _unique(pairs)
        word = tree.get(bits)
        if type(word) is str and word in lists:
            tree[bits] = lists[word]
        return tree

    data, lists = without_bit_lists(data, bits) if bits else (data, {})
    try:
        tree = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=taken if lists else _unique,
            parse_constant=constant,
            parse_float=_finite,
        )
        return exact.tree(tree)
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            f"{where}: not standard JSON of one object: {error}",
            hint="Get the file again from where it was written.",
            path=where,
        ) from error


def holds_constants(data: bytes) -> bool:
    """Whether text that is JSON otherwise may have a NaN or an infinity in it."""
    return b"NaN" in data or b"Infinity" in data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("an object has the same key twice")
    return tree


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is larger than any float")
    return value

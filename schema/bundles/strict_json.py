"""JSON from anywhere: standard, no key twice, no number that a float cannot hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from trajreplay.schema import exact
from trajreplay.schema.bundles.bit_lists import without_bit_lists
from trajreplay.schema.errors import DatasetError

_NESTED = frozenset((dict, list))


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

    data, lists = without_bit_lists(data, bits) if bits else (data, {})
    try:
        text = data.decode("utf-8")
        tree = json.loads(text, parse_constant=constant, parse_float=_finite)
        if _keys(tree, bits, lists) != data.count(b'":') or _LOOSE.search(data):
            tree = json.loads(
                text, object_pairs_hook=_unique, parse_constant=constant, parse_float=_finite
            )
            _keys(tree, bits, lists)
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


# A tree holds each key of an object once, and every key of the text has a colon behind its quote:
# where there are as many of these as the tree has keys, no key was there twice. Counting is several
# times cheaper than a hook for every object; where the two differ, the hook decides.
_LOOSE = re.compile(rb'"[ \t\r\n]+:')


def _keys(tree: Any, bits: str, lists: Mapping[str, Any]) -> int:
    """The keys of the objects of a tree, in which the words of lists of bits become the lists.

    Without such words, objects behind other values in a list are not looked for.
    """
    keys, ahead = 0, [tree] if type(tree) in _NESTED else []
    while ahead:
        one = ahead.pop()
        if type(one) is dict:
            keys += len(one)
            word = one.get(bits)
            if type(word) is str and word in lists:
                one[bits] = lists[word]
            ahead += [value for value in one.values() if type(value) in _NESTED]
        elif lists or (one and type(one[0]) in _NESTED):
            ahead += [value for value in one if type(value) in _NESTED]
    return keys


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

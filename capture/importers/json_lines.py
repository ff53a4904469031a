"""Files of one JSON object a line: told by the names in their first line, read line by line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from json.decoder import JSONDecodeError
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajreplay.capture.importers.places import opened
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.strict_json import load_object
from trajreplay.schema.errors import DatasetError

MAX_LINE_BYTES = 1 << 30
_LOOKED_AT_BYTES = 1 << 20
_LARGEST = float(np.finfo(np.float32).max)
_SPACE = " \t\r\n"

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Bits = npt.NDArray[np.uint8]


def first_names(path: Path) -> frozenset[str]:
    """The names in the first object of a file; of one that is very long, those at its beginning.

    Nothing for a file that begins with no object.
    """
    try:
        with opened(path) as file:
            line = file.readline(_LOOKED_AT_BYTES)
    except (DatasetError, OSError):
        return frozenset()
    return frozenset(_names(line.decode("utf-8", "replace")))


def begins_with_no_object(path: Path) -> bool:
    """Whether the first line of a file is empty, cut, or no object in JSON."""
    try:
        with opened(path) as file:
            line = file.readline(_LOOKED_AT_BYTES)
    except (DatasetError, OSError):
        return True
    if len(line) == _LOOKED_AT_BYTES:
        return False  # only the beginning of it was looked at
    try:
        return type(json.loads(line)) is not dict
    except (ValueError, RecursionError):
        return True


def _names(text: str) -> Iterator[str]:
    """The names of an object, as far as the text goes."""
    decode = json.JSONDecoder().raw_decode
    place = _after(text, 0, "{")
    try:
        while place is not None:
            name, end = decode(text, place)
            start = _after(text, end, ":")
            if type(name) is not str or start is None:
                return
            yield name
            _, end = decode(text, start)
            place = _after(text, end, ",")
    except (JSONDecodeError, RecursionError, ValueError):
        return


def _after(text: str, place: int, mark: str) -> int | None:
    """Where something begins after a mark; None where the mark is not next."""
    while place < len(text) and text[place] in _SPACE:
        place += 1
    if text[place : place + 1] != mark:
        return None
    place += 1
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place


def objects(path: Path, *, allow_nan: bool = False) -> Iterator[Fields]:
    """The objects of a file, one a line, one at a time in memory.

    Args:
        path: The file.
        allow_nan: Whether NaN and infinities are read as Python writes them.

    Raises:
        DatasetError: A line is no object in standard JSON, or too long.
    """
    with opened(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise DatasetError(
                    f"{where}: more than {MAX_LINE_BYTES:,} bytes, expected one object a line",
                    path=str(path),
                )
            yield Fields(load_object(line, where, allow_nan=allow_nan), where)


def float32s(value: Any) -> Float32s:
    """A list of numbers, null among them as NaN."""
    if type(value) is not list or not set(map(type, value)) <= {int, float, type(None)}:
        raise ValueError("a list of numbers")
    found = np.array(value, np.float64)
    if (np.isfinite(found) & (np.abs(found) > _LARGEST)).any():
        raise ValueError("numbers that float32 can hold")
    return found.astype(np.float32)


def bits(value: Any) -> Bits:
    """A list of 0 and 1, or of false and true."""
    if type(value) is not list or not set(map(type, value)) <= {int, float, bool}:
        raise ValueError("a list of 0 and 1")
    found = np.array(value, np.float64)
    if not ((found == 0) | (found == 1)).all():
        raise ValueError("a list of 0 and 1")
    return found.astype(np.uint8)


def token_ids(value: Any) -> Int32s:
    """A list of integers from 0 on that fit 32 bits."""
    if type(value) is not list or not set(map(type, value)) <= {int}:
        raise ValueError("a list of integers")
    found = np.array(value, np.int64)
    if ((found < 0) | (found >= 2**31)).any():
        raise ValueError("integers from 0 to 2147483647")
    return found.astype(np.int32)


def response_start(mask: Bits) -> int:
    """Where the response of a sequence begins of which only the trained tokens are recorded.

    That is at the first of them: what comes before it is the prompt, or counts for nothing.
    """
    trained = np.flatnonzero(mask)
    return int(trained[0]) if len(trained) else len(mask)

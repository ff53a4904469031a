"""Long lists of 0 and 1 in JSON, read as arrays: one by one they take most of the time."""

from __future__ import annotations

import itertools
import re
import secrets
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]
_SPACE = b" \t\r\n"  # no other is one to JSON
_BEGINS = re.compile(rb"[%s]*:[%s]*(\[)[%s]*(?=[01])" % ((_SPACE,) * 3))
_BETWEEN = re.compile(rb"[01]([%s]*,[%s]*)[01]" % ((_SPACE,) * 2))


def without_bit_lists(data: bytes, name: str) -> tuple[bytes, dict[str, Bits]]:
    """Take the lists of 0 and 1 under a name out of a JSON text.

    Args:
        data: The text, which need not be JSON.
        name: The name.

    Returns:
        The text with a word in place of each list, and the lists by word. No word is in the text
        before. Lists of anything else stay where they are.
    """
    label = b'"%s"' % name.encode()
    pieces: list[bytes] = []
    lists: list[bytes] = []
    done = 0
    place = data.find(label)
    while place >= 0:
        ahead = place + len(label)
        begins = _BEGINS.match(data, ahead)
        # A quote after a backslash is inside of a text.
        if begins is not None and data[place - 1 : place] != b"\\":
            stop = data.find(b"]", begins.end())
            if stop < 0:
                break
            digits = _digits(data[begins.end() : stop].rstrip(_SPACE))
            ahead = stop  # whatever it holds, so that each byte is looked at once
            if digits is not None:
                pieces.append(data[done : begins.start(1)])
                lists.append(digits)
                done = stop + 1
        place = data.find(label, ahead)
    word = secrets.token_hex(16)
    keys = [f"{word}-{number}" for number in range(len(lists))]
    text = b"".join(b'%s"%s"' % pair for pair in zip(pieces, map(str.encode, keys), strict=True))
    return text + data[done:], dict(zip(keys, _arrays(lists), strict=True))


def _arrays(lists: list[bytes]) -> list[Bits]:
    """The numbers of lists of digits, which differ in their last bit."""
    values = np.frombuffer(b"".join(lists), np.uint8) & np.uint8(1)
    ends = list(itertools.accumulate(map(len, lists), initial=0))
    return [values[start:stop] for start, stop in itertools.pairwise(ends)]


def _digits(text: bytes) -> bytes | None:
    """The digits of a list without its brackets, if each is 0 or 1."""
    between = _BETWEEN.match(text)
    if between is None:
        return text if len(text) == 1 else None
    digits = text[:: 1 + len(between[1])]
    size = 1 << (len(digits) - 1).bit_length()
    whole = len(text) == len(digits) + len(between[1]) * (len(digits) - 1)
    if whole and _ones(between[1], size).startswith(text.replace(b"0", b"1")):
        return digits
    return _digits_of_any_spacing(text)


@lru_cache(maxsize=1)
def _ones(between: bytes, count: int) -> bytes:
    """As many ones, as one writer spaces them: the lists of a file are written alike."""
    return between.join([b"1"] * count)


def _digits_of_any_spacing(text: bytes) -> bytes | None:
    marks = text.translate(None, _SPACE)
    digits, commas = marks[::2], marks[1::2]
    if not digits or len(digits) == len(commas):
        return None
    if digits.translate(None, b"01") or commas.translate(None, b","):
        return None
    return digits

"""Long lists of 0 and 1 in JSON, read as arrays: one by one they take most of the time."""

from __future__ import annotations

import re
import secrets

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]
_BEGINS = re.compile(rb"\s*:\s*\[")
_SPACE = b" \t\r\n"


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
    word = secrets.token_hex(16)
    pieces: list[bytes] = []
    found: dict[str, Bits] = {}
    done = 0
    place = data.find(label)
    while place >= 0:
        # A list of numbers ends before the next label, so that each byte is searched once.
        following = data.find(label, place + len(label))
        begins = _BEGINS.match(data, place + len(label))
        # A quote after a backslash is inside of a text.
        if begins is not None and data[place - 1 : place] != b"\\":
            stop = data.find(b"]", begins.end(), following if following >= 0 else len(data))
            bits = _bits(data[begins.end() : stop]) if stop >= 0 else None
            if bits is not None:
                key = f"{word}-{len(found)}"
                found[key] = bits
                pieces += [data[done : begins.end() - 1], b'"%s"' % key.encode()]
                done = stop + 1
        place = following
    return b"".join([*pieces, data[done:]]), found


def _bits(text: bytes) -> Bits | None:
    """The numbers between two brackets, if each is 0 or 1."""
    marks = text.translate(None, _SPACE)
    numbers, commas = marks[::2], marks[1::2]
    if not numbers or len(numbers) == len(commas):
        return None
    if numbers.translate(None, b"01") or commas.translate(None, b","):
        return None
    return np.frombuffer(numbers, np.uint8) & np.uint8(1)  # the digits differ in their last bit

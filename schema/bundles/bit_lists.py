"""Long lists of 0 and 1 in JSON, read as arrays: one by one they take most of the time."""

from __future__ import annotations

import itertools
import re
import secrets
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]
_LAST = np.uint8(1)  # the bit in which the digits differ
_BLOCK_BYTES = 1 << 15  # looked at together: of more, each step waits for the memory
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
    places: list[tuple[int, int]] = []
    arrays: list[Bits | None] = []
    texts: list[bytes] = []
    size = 0
    place = data.find(label)
    while place >= 0:
        ahead = place + len(label)
        begins = _BEGINS.match(data, ahead)
        # A quote after a backslash is inside of a text.
        if begins is not None and data[place - 1 : place] != b"\\":
            stop = data.find(b"]", begins.end())
            if stop < 0:
                break
            places.append((begins.start(1), stop + 1))
            texts.append(data[begins.end() : stop].rstrip(_SPACE))
            size += len(texts[-1])
            if size > _BLOCK_BYTES:
                arrays += _arrays(texts)
                texts, size = [], 0
            ahead = stop  # whatever it holds, so that each byte is looked at once
        place = data.find(label, ahead)
    return _replaced(data, places, arrays + _arrays(texts))


def _replaced(
    data: bytes, places: list[tuple[int, int]], arrays: list[Bits | None]
) -> tuple[bytes, dict[str, Bits]]:
    """A text with words in the places of the lists that became arrays, and these by word."""
    word = secrets.token_hex(16)
    lists: dict[str, Bits] = {}
    pieces: list[bytes] = []
    done = 0
    for (start, stop), array in zip(places, arrays, strict=True):
        if array is not None:
            key = f"{word}-{len(lists)}"
            lists[key] = array
            pieces += (data[done:start], b'"%s"' % key.encode())
            done = stop
    return b"".join((*pieces, data[done:])), lists


def _arrays(texts: list[bytes]) -> list[Bits | None]:
    """The numbers of lists without their brackets; None for one that holds anything else."""
    between = next((found[1] for one in texts if (found := _BETWEEN.match(one))), b",")
    together = _digits_spaced(between.join([*texts, b""]), between)
    if together is None:
        digits = map(_digits_of_any_spacing, texts)
        return [None if one is None else np.frombuffer(one, np.uint8) & _LAST for one in digits]
    # Every list is whole in itself: it ends with a digit, since a separator follows it.
    ends = itertools.accumulate(
        ((len(one) + len(between)) // (1 + len(between)) for one in texts), initial=0
    )
    return [together[start:stop] for start, stop in itertools.pairwise(ends)]


def _digits_spaced(text: bytes, between: bytes) -> Bits | None:
    """The digits of a text in which each is 0 or 1 and followed by the same separator."""
    step = 1 + len(between)
    count, rest = divmod(len(text), step)
    if rest:
        return None
    differs = np.frombuffer(text, np.uint8) ^ _zeros(between, count)
    digits = differs[::step].copy()
    differs[::step] = 0
    plain = not len(text) or (digits.max() <= 1 and not differs.max())
    return digits if plain else None


def _zeros(between: bytes, count: int) -> Bits:
    """As many zeros, as one writer spaces them: the lists of a file are written alike."""
    least = 1 << (count - 1).bit_length() if count else 0
    return _many_zeros(between, least)[: count * (1 + len(between))]


@lru_cache(maxsize=2)
def _many_zeros(between: bytes, count: int) -> Bits:
    return np.frombuffer((b"0" + between) * count, np.uint8)


def _digits_of_any_spacing(text: bytes) -> bytes | None:
    marks = text.translate(None, _SPACE)
    digits, commas = marks[::2], marks[1::2]
    if not digits or len(digits) == len(commas):
        return None
    if digits.translate(None, b"01") or commas.translate(None, b","):
        return None
    return digits

"""What the pages of a Parquet column claim to hold: the reader allocates it before it looks inside.

A footer says how large a column is; each page says how much memory it takes once it is
decompressed, and may say something else. Its header, in front of it, is a struct of Thrift's
compact protocol.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

import pyarrow.parquet as pq

ReadAt = Callable[[int, int], bytes]
Content = bytes | ReadAt  # of a file: all of it, or a way to so many bytes from an offset
_Numbers = dict[tuple[int, ...], int]  # by the path of a field: its number in each struct
TEXT_LIMIT_BYTES = 256 << 20
_VALUE_BYTES = 16  # two of the widest values, or one with its levels and its place in a dictionary
_SLACK_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 10
_HEADER_BYTES = 1 << 20
_MAX_DEPTH = 8
_UNCOMPRESSED, _COMPRESSED, _DICTIONARY_VALUES = (2,), (3,), (7, 1)
_DICTIONARY_VALUE_BYTES = 4  # no value of a dictionary is shorter
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12

# A dictionary page, or a data page of version 1 without statistics, as nearly all pages are: its
# type, both sizes, then in the header of its kind the number of values, and encodings.
VARINT = rb"[\x80-\xff]{0,4}[\x00-\x7f]"  # of 32 bits
_SHORT = rb"\x15[\x00-\x7f]"
_PLAIN = re.compile(
    rb"%(short)b\x15(%(number)b)\x15(%(number)b)"
    rb"(?:\x4c\x15(%(number)b)%(short)b[\x11\x12]?"
    rb"|\x2c\x15%(number)b%(short)b%(short)b%(short)b(?:\x1c\x00)?)\x00\x00"
    % {b"short": _SHORT, b"number": VARINT}
)


def check_claims(
    content: Content, file_bytes: int, chunks: Iterable[pq.ColumnChunkMetaData], is_text: bool
) -> None:
    """Hold what the pages of a column claim to take against what its values can need.

    Args:
        content: The file; what reads from an offset gives fewer bytes at its end.
        file_bytes: Size of the file.
        chunks: The parts of the column that will be decoded.
        is_text: Whether its values are text, whose length no footer tells.

    Raises:
        ValueError: They claim too much, or the header of a page is none.
    """
    claimed, values = 0, 0
    for chunk in chunks:
        start = chunk.data_page_offset
        dictionary = chunk.dictionary_page_offset
        if dictionary is not None and 0 < dictionary < start:  # as a reader goes about it
            start = dictionary
        stop = start + chunk.total_compressed_size
        if not 0 <= start <= stop <= file_bytes:
            raise ValueError(f"pages from byte {start} to {stop}")
        claimed += _claimed(content, start, stop)
        values += chunk.num_values
    limit = _VALUE_BYTES * values + (TEXT_LIMIT_BYTES if is_text else _SLACK_BYTES)
    if claimed > limit:
        raise ValueError(f"pages that decode to {claimed} bytes, expected at most {limit}")


def _claimed(content: Content, start: int, stop: int) -> int:
    """What the pages between two places of a file decode to, as their headers say."""
    total = 0
    while start < stop:
        if isinstance(content, bytes):
            plain, skipped = _PLAIN.match(content, start), 0
        else:
            plain, skipped = _PLAIN.match(content(start, _WINDOW_BYTES)), start
        if plain is not None:
            size, packed, values = map(signed, plain.groups(b"\0"))
            start = skipped + plain.end()
        else:
            size, packed, values, start = _odd_header(content, start)
        if size < 0 or packed < 0 or start + packed > stop:
            raise ValueError(f"a page of {packed} bytes that decode to {size}")
        if not 0 <= values * _DICTIONARY_VALUE_BYTES <= size:
            raise ValueError(f"a dictionary of {values} values in {size} bytes")
        total += size
        start += packed
    return total


def _odd_header(content: Content, start: int) -> tuple[int, int, int, int]:
    """Of a page: its size, its compressed size, its values if a dictionary, and where it begins."""
    window = _WINDOW_BYTES
    while True:
        if isinstance(content, bytes):
            raw = content[start : start + window]
        else:
            raw = content(start, window)
        numbers: _Numbers = {}
        try:
            end = _read_struct(raw, 0, (), numbers)
        except IndexError:
            if len(raw) < window or window >= _HEADER_BYTES:
                raise ValueError("a page header without an end") from None
            window *= 32
        else:
            size, packed = numbers.get(_UNCOMPRESSED, -1), numbers.get(_COMPRESSED, -1)
            return size, packed, numbers.get(_DICTIONARY_VALUES, 0), start + end


def _read_struct(raw: bytes, at: int, path: tuple[int, ...], numbers: _Numbers) -> int:
    """Add the numbers of a struct to those found, and return where it ends."""
    field = 0
    while byte := raw[at]:
        at += 1
        kind = byte & 15
        if byte >> 4:
            field += byte >> 4
        else:
            field, at = _read_number(raw, at)
        here = (*path, field)
        if here in numbers or not 0 < field < 1 << 15 or len(here) > _MAX_DEPTH:
            raise ValueError(f"a page header with an odd field {field}")
        if kind == _I32:
            numbers[here], at = _read_number(raw, at)
        elif kind == _STRUCT:
            numbers[here] = 0
            at = _read_struct(raw, at, here, numbers)
        elif kind == _BINARY:
            size, at = _read_varint(raw, at)
            at += size
        elif kind in (_I16, _I64):
            at = _read_varint(raw, at)[1]
        elif kind in (_BYTE, _DOUBLE):
            at += 1 if kind == _BYTE else 8
        elif kind not in (_TRUE, _FALSE):  # these are in the byte that names the field
            raise ValueError(f"a page header with a value of kind {kind}")
    return at + 1


def _read_number(raw: bytes, at: int) -> tuple[int, int]:
    """A whole number of 32 bits with its sign, and where it ends."""
    start, at = at, _read_varint(raw, at)[1]
    return signed(raw[start:at]), at


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    start = at
    while raw[at] > 0x7F:
        at += 1
    if at - start > 9:
        raise ValueError("a page header with a number of more than 64 bits")
    return _whole(raw[start : at + 1]), at + 1


def _whole(varint: bytes) -> int:
    value = 0
    for byte in reversed(varint):
        value = value << 7 | byte & 0x7F
    return value


@lru_cache(maxsize=4096)
def signed(varint: bytes) -> int:
    """The whole number of 32 bits that a varint of Thrift's compact protocol holds."""
    value = _whole(varint) & 0xFFFFFFFF
    return value >> 1 ^ -(value & 1)

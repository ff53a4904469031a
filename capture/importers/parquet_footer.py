"""How the columns of a Parquet file are compressed and encoded, read without pyarrow.

To ask pyarrow for it ends the process where a footer is damaged: what its accessors throw is caught
by nobody. A footer, and what stands before each page, is a struct of Thrift's compact protocol.

Source: parquet.thrift of apache/parquet-format, and the compact protocol of Apache Thrift.
"""

from __future__ import annotations

from typing import Any, BinaryIO

MAGIC = b"PAR1"
MAX_FOOTER_BYTES = 1 << 20
_MAX_DEPTH = 12
_MAX_PAGES = 1 << 16
_PAGE_HEADER_BYTES = 1 << 16
# Field numbers of the footer, a row group, a column of it, and what is said of that.
_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3
_PATH, _CODEC, _VALUES, _BYTES, _DATA_PAGES, _DICTIONARY = 3, 4, 5, 7, 9, 11
# Those of a page: its bytes, and the encoding in what is said of a page of each kind.
_PACKED = 3
_ENCODINGS = ((5, 2), (7, 2), (8, 4))
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
# Encodings in which a value takes its own bytes, or is a number of 32 bits at most.
_OWN_BYTES = {0: "PLAIN", 2: "PLAIN_DICTIONARY", 3: "RLE", 8: "RLE_DICTIONARY"}
_OTHERS = {5: "DELTA_BINARY_PACKED", 6: "DELTA_LENGTH_BYTE_ARRAY", 7: "DELTA_BYTE_ARRAY"}
CODECS = ("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")


def compressions(file: BinaryIO) -> set[str]:
    """The compressions of all columns of a file.

    Raises:
        ValueError: It has no footer, one that is too long, or one that says something else.
    """
    try:
        numbers = {chunk[_CODEC] for chunk in _chunks(file)}
        return {CODECS[number] for number in numbers if number >= 0} | {
            f"number {number}" for number in numbers if number < 0
        }
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("its footer is damaged") from error


def check_pages(file: BinaryIO, most_values: int) -> None:
    """Refuse pages of which few bytes may stand for any number of values, or for long ones.

    Such as those of an encoding that takes the beginning of a text from the one before it.

    Args:
        file: The file.
        most_values: How many values a column without lists may have.

    Raises:
        ValueError: It has such pages, or is damaged.
    """
    try:
        pages = 0
        for chunk in _chunks(file):
            if len(chunk[_PATH]) == 1 and not 0 <= chunk[_VALUES] <= most_values:
                raise ValueError(f"a column of {chunk[_VALUES]:,} values")
            at, data = chunk.get(_DICTIONARY, 0), chunk[_DATA_PAGES]
            at = at if 0 < at < data else data
            stop = at + chunk[_BYTES]
            while at < stop and pages < _MAX_PAGES:
                at = _checked_page(file, at)
                pages += 1
        if pages >= _MAX_PAGES:
            raise ValueError(f"more than {_MAX_PAGES:,} pages")
    except (IndexError, KeyError, TypeError, OSError) as error:
        raise ValueError("its footer or a page is damaged") from error


def _checked_page(file: BinaryIO, at: int) -> int:
    """Check the encoding of the page that begins at a byte, and return where the next one does."""
    file.seek(at)
    header, size = _struct(file.read(_PAGE_HEADER_BYTES), 0, 0)
    encodings = [header[kind][field] for kind, field in _ENCODINGS if kind in header]
    odd = [one for one in encodings if one not in _OWN_BYTES]
    if odd:
        raise ValueError(f"pages encoded as {_OTHERS.get(odd[0], f'number {odd[0]}')}")
    if header[_PACKED] < 0:
        raise ValueError("a page of fewer bytes than none")
    return at + size + int(header[_PACKED])


def _chunks(file: BinaryIO) -> list[Any]:
    """What the footer says of each column of each row group."""
    size = file.seek(0, 2)
    file.seek(max(size - 8, 0))
    length, magic = int.from_bytes(file.read(4), "little"), file.read(4)
    if magic != MAGIC or not 0 < length <= min(size - 12, MAX_FOOTER_BYTES):
        raise ValueError("it has no footer, or none of a size that such files have")
    file.seek(size - 8 - length)
    footer, _ = _struct(file.read(length), 0, 0)
    return [chunk[_META_DATA] for group in footer[_ROW_GROUPS] for chunk in group[_COLUMNS]]


def _struct(raw: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by number, and where it ends."""
    if depth > _MAX_DEPTH:
        raise ValueError("its footer is nested too deep")
    fields: dict[int, Any] = {}
    number = 0
    while byte := raw[at]:
        at += 1
        if byte >> 4:
            number += byte >> 4
        else:
            number, at = _integer(raw, at)
        kind = byte & 15
        if kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _value(raw, at, kind, depth)
    return fields, at + 1


def _value(raw: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (_I16, _I32, _I64):
        return _integer(raw, at)
    if kind == _BINARY:
        size, at = _varint(raw, at)
        return None, at + size
    if kind == _STRUCT:
        return _struct(raw, at, depth + 1)
    if kind in (_LIST, _SET):
        return _list(raw, at, depth + 1)
    if kind in (_BYTE, _TRUE, _FALSE):
        return raw[at], at + 1
    if kind == _DOUBLE:
        return None, at + 8
    raise ValueError(f"its footer has a value of kind {kind}")


def _list(raw: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    size, kind = raw[at] >> 4, raw[at] & 15
    at += 1
    if size == 15:
        size, at = _varint(raw, at)
    if depth > _MAX_DEPTH or size > len(raw):
        raise ValueError("its footer has a list that it cannot hold")
    values = []
    for _ in range(size):
        value, at = _value(raw, at, kind, depth)
        values.append(value)
    return values, at


def _integer(raw: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(raw, at)
    return value >> 1 ^ -(value & 1), at


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while raw[at] > 0x7F:
        value |= (raw[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise ValueError("its footer has a number of more than 64 bits")
    return value | raw[at] << shift, at + 1

"""A short way to float lists: the values of a plain page as they lie there, behind its levels.

Decoding the levels of a Parquet list costs most of the time of a replay, and says only where each
list ends, which `response_length` says too. So, of a file whose bytes are verified, the values
behind the levels are taken as they are, with the lengths from that column. What this makes is used
only if it has the digest that was sealed at capture, or the very levels of a column that has; it is
read in the ordinary way otherwise: this can be slower than that, not wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from trajreplay.query.datafile import OpenFile
from trajreplay.query.page_headers import VARINT, signed
from trajreplay.schema.digest import list_digest
from trajreplay.schema.lists import ListBounds
from trajreplay.schema.tables import length_column

_CODECS = {"LZ4": pa.Codec("lz4_raw"), "UNCOMPRESSED": None}
_LEVELS_BYTES = 1 << 16
# The header of a data page of version 1 in Thrift's compact protocol: page type 0, uncompressed
# and compressed size, then number of values, encoding PLAIN, both levels RLE, no statistics.
_PLAIN_PAGE = re.compile(
    rb"\x15\x00\x15(%b)\x15(%b)\x2c\x15%b\x15\x00\x15\x06\x15\x06(?:\x1c\x00)?\x00\x00"
    % (VARINT, VARINT, VARINT),
    re.DOTALL,
)


class _Plain(NamedTuple):
    """What plain pages hold: the bytes of their levels, page by page, and their values."""

    levels: list[bytes]
    values: Any


def proven_columns(
    opened: OpenFile, names: Sequence[str], lengths: dict[str, pa.ChunkedArray]
) -> dict[str, pa.ChunkedArray]:
    """Float lists of a capture that has its row groups to itself, without nulls.

    Args:
        opened: The file.
        names: Columns of float lists that are wanted.
        lengths: Columns that were read; of these, `response_length` and `total_length` count.

    Returns:
        Those of the columns for which the short way gave values of the sealed digest.
    """
    file, table = opened.file, opened.table
    if opened.whole is None or file.first_row or file.rows != sum(file.row_groups):
        return {}
    bounds: dict[str, ListBounds] = {}
    levels: dict[str, list[bytes]] = {}  # of a proven column, by what its lists are as long as
    proven: dict[str, pa.ChunkedArray] = {}
    for name in names:
        seal, by = file.columns[name], length_column(name)
        if seal.nulls or by not in lengths:
            continue
        lists = bounds.get(by) or bounds.setdefault(by, ListBounds(lengths[by]))
        if lists.count != seal.values:
            continue
        plain = _plain(opened, opened.whole, name, seal.values)
        if plain is None:
            continue
        if plain.levels != levels.get(by):
            if list_digest(table[name].type, lists.lengths, plain.values) != seal.digest:
                continue
            levels[by] = plain.levels
        floats = pa.Array.from_buffers(
            pa.float32(), seal.values, [None, pa.py_buffer(plain.values)], null_count=0
        )
        column = pa.ListArray.from_arrays(lists.offsets, floats, type=table[name].type)
        proven[name] = pa.chunked_array([column])
    return proven


def _plain(opened: OpenFile, whole: bytes, name: str, count: int) -> _Plain | None:
    """The little-endian values of a column's pages, or nothing where they are not plain."""
    levels: list[bytes] = []
    parts: list[Any] = []
    size = 0
    limit = 5 * count + _LEVELS_BYTES
    for group in opened.row_groups:
        chunk = opened.chunk(group, name)
        if (
            chunk.physical_type != "FLOAT"
            or chunk.has_dictionary_page
            or chunk.compression not in _CODECS
        ):
            return None
        page = chunk.data_page_offset
        last = page + chunk.total_compressed_size
        while page < last:
            found = _page(whole, page, _CODECS[chunk.compression], limit - 4 * size)
            if found is None:
                return None
            content, page = found
            view = memoryview(content)
            at = 0
            for _ in range(2):  # repetition levels, definition levels, each behind its length
                at += 4 + int.from_bytes(view[at : at + 4], "little")
            if at > len(view):
                return None
            levels.append(bytes(view[:at]))
            parts.append(view[at:])
            size += (len(view) - at) // 4
    values = parts[0] if len(parts) == 1 else b"".join(parts)
    return _Plain(levels, values) if len(values) == 4 * count else None


def _page(raw: bytes, start: int, codec: pa.Codec | None, limit: int) -> tuple[Any, int] | None:
    """The content of one plain data page, and where the next page begins."""
    header = _PLAIN_PAGE.match(raw, start)
    if header is None:
        return None
    size, packed = signed(header[1]), signed(header[2])
    body, end = header.end(), header.end() + packed
    if not (body <= end <= len(raw) and 0 <= size <= limit):
        return None
    content = memoryview(raw)[body:end]
    if codec is None:
        return content, end
    try:
        return codec.decompress(content, decompressed_size=size), end
    except (pa.ArrowException, OSError, ValueError):
        return None

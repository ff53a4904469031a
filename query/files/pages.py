"""A short way to float lists: the values of a plain page as they lie there, behind its levels.

Decoding the levels of a Parquet list costs most of the time of a replay, and says only where each
list ends, which `response_length` says too. So, of a file whose bytes are verified, the values
behind the levels are taken as they are, with the lengths from that column. What this makes is used
only if it has the digest that was sealed at capture, or the very levels of a column that has; it is
read in the ordinary way otherwise: this can be slower than that, not wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.query.files.datafile import OpenFile
from trajreplay.query.files.page_headers import VARINT, signed
from trajreplay.schema.digest import list_digest
from trajreplay.schema.lists import ListBounds
from trajreplay.schema.tables import length_column

_CODECS = {"LZ4": pa.Codec("lz4_raw"), "UNCOMPRESSED": None}
_FLOAT = pa.float32()
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
    values: pa.Buffer


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
        plain = _plain(opened.whole, opened.footer.chunks(name), seal.values)
        if plain is None:
            continue
        column_type = table[name].type
        if plain.levels != levels.get(by):
            if list_digest(column_type, lists.lengths, plain.values) != seal.digest:
                continue
            levels[by] = plain.levels
        floats = pa.Array.from_buffers(_FLOAT, seal.values, [None, plain.values], null_count=0)
        column = pa.ListArray.from_arrays(lists.offsets, floats, type=column_type)
        proven[name] = pa.chunked_array([column])
    return proven


def _plain(whole: bytes, chunks: Iterable[pq.ColumnChunkMetaData], count: int) -> _Plain | None:
    """The little-endian values of a column's pages, or nothing where they are not plain."""
    raw = pa.py_buffer(whole)
    levels: list[bytes] = []
    parts: list[pa.Buffer] = []
    limit = 5 * count + _LEVELS_BYTES
    for chunk in chunks:
        compression = chunk.compression
        if (
            chunk.physical_type != "FLOAT"
            or chunk.has_dictionary_page
            or compression not in _CODECS
        ):
            return None
        codec, page = _CODECS[compression], chunk.data_page_offset
        last = page + chunk.total_compressed_size
        while page < last:
            header = _PLAIN_PAGE.match(whole, page)
            if header is None:
                return None
            size, packed, page = signed(header[1]), signed(header[2]), header.end()
            if not (0 <= packed <= len(whole) - page and 0 <= size <= limit):
                return None
            content = _unpacked(raw.slice(page, packed), codec, size)
            if content is None:
                return None
            page += packed
            at = _levels_end(content)
            if at > content.size:
                return None
            levels.append(content.slice(0, at).to_pybytes())
            parts.append(content.slice(at))
            limit -= content.size - at
    values = parts[0] if len(parts) == 1 else pa.py_buffer(b"".join(parts))
    return _Plain(levels, values) if values.size == 4 * count else None


def _unpacked(packed: pa.Buffer, codec: pa.Codec | None, size: int) -> pa.Buffer | None:
    if codec is None:
        return packed
    try:
        return codec.decompress(packed, decompressed_size=size)
    except (pa.ArrowException, OSError, ValueError):
        return None


def _levels_end(content: pa.Buffer) -> int:
    """Where the levels of a page end: repetition and definition, each behind its length."""
    view = memoryview(content)
    first = 4 + int.from_bytes(view[:4], "little")
    return first + 4 + int.from_bytes(view[first : first + 4], "little")

"""A short way to float lists: the values of a plain page as they lie there, proven by their digest.

Decoding the levels of a Parquet list costs most of the time of a replay, and says only where each
list ends, which `response_length` says too. So, of a file whose bytes are verified, the values
behind the levels are taken as they are, with the lengths from that column. What this makes is used
only if it has the digest that was sealed at capture, and is read in the ordinary way otherwise: it
can be slower than that, not wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.datafile import OpenFile
from trajreplay.schema.digest import column_digest
from trajreplay.schema.tables import length_column

_CODECS = {"LZ4": "lz4_raw", "UNCOMPRESSED": None}
_HEADER_BYTES = 256
_LEVELS_BYTES = 1 << 16
_DATA_PAGE = 0
_PLAIN = 0


def proven_columns(
    opened: OpenFile, names: Sequence[str], lengths: dict[str, pa.ChunkedArray]
) -> dict[str, pa.ChunkedArray]:
    """Float lists of a capture that has its row groups to itself, without nulls.

    Args:
        opened: The file.
        names: Columns that are wanted.
        lengths: The columns `response_length` and `total_length`, as far as they were read.

    Returns:
        Those of the columns for which the short way gave values of the sealed digest.
    """
    file = opened.file
    if opened.whole is None or file.first_row or file.rows != sum(file.row_groups):
        return {}
    offsets_of: dict[str, pa.Array] = {}
    proven: dict[str, pa.ChunkedArray] = {}
    for name in names:
        seal, by = file.columns[name], length_column(name)
        if not is_float_list(opened, name) or seal.nulls or by not in lengths:
            continue
        if by not in offsets_of:
            offsets_of[by] = _offsets(lengths[by])
        offsets = offsets_of[by]
        if offsets is None or offsets[-1].as_py() != seal.values:
            continue
        values = _values(opened, opened.whole, name, seal.values)
        if values is None:
            continue
        floats = pa.Array.from_buffers(pa.float32(), seal.values, [None, values])
        column = pa.ListArray.from_arrays(offsets, floats, type=opened.table[name].type)
        if column_digest(column) == seal.digest:
            proven[name] = pa.chunked_array([column])
    return proven


def is_float_list(opened: OpenFile, name: str) -> bool:
    """Whether a column holds lists of float32."""
    declared = opened.table[name].type
    return bool(pa.types.is_list(declared) and declared.value_type == pa.float32())


def _offsets(lengths: pa.ChunkedArray) -> pa.Array | None:
    if lengths.null_count or not len(lengths) or pc.min(lengths).as_py() < 0:
        return None
    counts = lengths.combine_chunks().cast(pa.int64())
    ends = pc.cumulative_sum(pa.concat_arrays([pa.array([0], pa.int64()), counts]))
    return ends.cast(pa.int32()) if ends[-1].as_py() < 2**31 else None


def _values(opened: OpenFile, whole: bytes, name: str, count: int) -> pa.Buffer | None:
    """The little-endian values of a column's pages, or nothing where they are not plain."""
    parts: list[Any] = []
    for group in opened.row_groups:
        chunk = opened.chunk(group, name)
        if (
            chunk.physical_type != "FLOAT"
            or chunk.has_dictionary_page
            or chunk.compression not in _CODECS
            or chunk.total_uncompressed_size > 5 * count + _LEVELS_BYTES
        ):
            return None
        page = chunk.data_page_offset
        last = page + chunk.total_compressed_size
        while page < last:
            found = _page(whole, page, _CODECS[chunk.compression], 5 * count + _LEVELS_BYTES)
            if found is None:
                return None
            values, page = found
            parts.append(values)
    if sum(len(part) for part in parts) != 4 * count:
        return None
    return pa.py_buffer(parts[0]) if len(parts) == 1 else pa.py_buffer(b"".join(parts))


def _page(raw: bytes, start: int, codec: str | None, limit: int) -> tuple[Any, int] | None:
    """The values of one data page behind its levels, and where the next page begins."""
    header = _header(raw[start : start + _HEADER_BYTES])
    if header is None:
        return None
    length, fields = header
    body, end = start + length, start + length + fields.get((3,), -1)
    plain = fields.get((1,)) == _DATA_PAGE and fields.get((5, 2)) == _PLAIN
    size = fields.get((2,), -1)
    if not plain or not body <= end <= len(raw) or not 0 <= size <= limit:
        return None
    content = raw[body:end]
    if codec is not None:
        try:
            content = pa.Codec(codec).decompress(content, decompressed_size=size)
        except (pa.ArrowException, OSError, ValueError):
            return None
    view = memoryview(content)
    at = 0
    for _ in range(2):  # repetition levels, definition levels, each behind its length
        at += 4 + int.from_bytes(view[at : at + 4], "little")
    return (view[at:], end) if at <= len(view) else None


def _header(data: bytes) -> tuple[int, dict[tuple[int, ...], int]] | None:
    """A page header in Thrift's compact protocol: its length and its integers, by field path."""
    fields: dict[tuple[int, ...], int] = {}
    at, last = 0, [0]
    path: tuple[int, ...] = ()
    try:
        while True:
            byte = data[at]
            at += 1
            if byte == 0:  # end of a struct
                if not path:
                    return at, fields
                path = path[:-1]
                last.pop()
                continue
            kind, delta = byte & 0x0F, byte >> 4
            if not delta:
                return None
            last[-1] += delta
            place = (*path, last[-1])
            if kind in (4, 5, 6):  # integers, zigzag
                value, at = _varint(data, at)
                fields[place] = (value >> 1) ^ -(value & 1)
            elif kind == 12:  # struct
                path = place
                last.append(0)
            elif kind not in (1, 2):  # a boolean is its kind; nothing else is in plain pages
                return None
    except IndexError:
        return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at

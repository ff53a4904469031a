"""Parquet files of a few kilobytes with a page that decodes to gigabytes."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_FRAME = b"\x28\xb5\x2f\xfd"
_SKIPPED = b"\x50\x2a\x4d\x18"
_BLOCK_BYTES = 1 << 17
_KEPT_BYTES = 1 << 12
_VARINT = rb"[\x80-\xff]*[\x00-\x7f]"
_HEADER = re.compile(rb"(\x15.)\x15(%b)\x15(%b)(.*?)\Z" % (_VARINT, _VARINT), re.DOTALL)


def plant(path: Path, column: str, size: int, *, claimed: int | None = None) -> None:
    """Let the first page of a zstd column hold so many bytes more, in the same place.

    Text has become one value of that length; other values are those that were there, and more.

    Args:
        path: The file; the page must have been large enough for the new one.
        column: Its column.
        size: How many bytes are added.
        claimed: What the header claims that the page decodes to, instead of the truth.
    """
    file = pq.ParquetFile(path)
    group = file.metadata.row_group(0)
    chunks = (group.column(index) for index in range(group.num_columns))
    chunk = next(one for one in chunks if one.path_in_schema == column)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    raw = path.read_bytes()
    body = raw.index(_FRAME, start)
    found = _HEADER.match(raw[start:body])
    assert found
    kind, old_size, old_packed, rest = found.groups()
    room = body - start + _signed(old_packed)
    content = pa.Codec("zstd").decompress(
        raw[body : start + room], decompressed_size=_signed(old_size), asbytes=True
    )
    kept = _kept(content, chunk.physical_type == "BYTE_ARRAY", size)
    frame = _zstd(kept, size)
    total = len(kept) + size if claimed is None else claimed
    header = kind + b"\x15" + _varint(total) + b"\x15" + old_packed + rest
    packed = room - len(header)
    header = kind + b"\x15" + _varint(total) + b"\x15" + _varint(packed) + rest
    assert len(header) + packed == room
    padding = packed - len(frame) - 8
    assert padding >= 0
    page = header + frame + _SKIPPED + padding.to_bytes(4, "little") + bytes(padding)
    path.write_bytes(raw[:start] + page + raw[start + room :])


def _kept(content: bytes, is_text: bool, size: int) -> bytes:
    """What stays of a page: of text its levels and the new length of its value."""
    if not is_text:
        return content[:_KEPT_BYTES]
    at = 0
    if int.from_bytes(content[:4], "little") < 16:  # levels stand before the values
        at = 4 + int.from_bytes(content[:4], "little")
    return content[:at] + size.to_bytes(4, "little")


def _zstd(head: bytes, size: int) -> bytes:
    """A frame of one raw block and of blocks that each repeat one byte."""
    total = len(head) + size
    blocks = [(len(head) << 3).to_bytes(3, "little") + head]
    while size:
        part = min(size, _BLOCK_BYTES)
        size -= part
        blocks.append((part << 3 | 1 << 1 | (not size)).to_bytes(3, "little") + b"x")
    return _FRAME + b"\xa0" + total.to_bytes(4, "little") + b"".join(blocks)


def _varint(value: int) -> bytes:
    """A number in Thrift's compact protocol."""
    value <<= 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _signed(varint: bytes) -> int:
    return sum((byte & 0x7F) << 7 * index for index, byte in enumerate(varint)) >> 1

"""The archive that `torch.save` writes, where nothing about it is unusual: read without zipfile."""

from __future__ import annotations

import struct
import zlib
from typing import Any

_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q4sLQL")  # and what points to it, as torch writes them always
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_USUAL_FLAGS = 0x0808  # sizes follow the member, names are in UTF-8
_NEWEST = 45  # version of the format, from which on there are large files
_MAX_MEMBERS = 4096


def plain_members(data: bytes) -> dict[str, memoryview] | None:
    """The members of an archive by name, each stored as it is, whole and once: parts of its bytes.

    None for an archive that is anything else: compressed, damaged, of more than 4 GiB, with a
    comment or with members that overlap. Whether that is an error is not decided here.
    """
    if len(data) < _END.size:
        return None
    mark, disk, of_disk, here, count, size, start, comment = _END.unpack_from(
        data, len(data) - _END.size
    )
    if mark != b"PK\x05\x06" or disk or of_disk or here != count or comment:
        return None
    stop = start + size
    if not 0 < count <= _MAX_MEMBERS or stop + _END.size > len(data):
        return None
    between = data[stop : len(data) - _END.size]
    if between and not _repeats(between, count, size, start):
        return None
    found: dict[str, memoryview] = {}
    whole = memoryview(data)
    at, free = start, 0
    for _ in range(count):
        if at + _ENTRY.size > len(data):
            return None
        entry = _ENTRY.unpack_from(data, at)
        label = data[at + _ENTRY.size : at + _ENTRY.size + entry[10]]
        member = _member(data, start, entry, label, free)
        if member is None or not label.isascii():
            return None
        begins, free = member
        name, content = label.decode(), whole[begins:free]
        if name in found or not name.isprintable() or zlib.crc32(content) != entry[7]:
            return None
        found[name] = content
        at += _ENTRY.size + entry[10] + entry[11] + entry[12]
    return found if at == stop else None


def _repeats(between: bytes, count: int, size: int, start: int) -> bool:
    """Whether the larger form of the end says what the smaller one does."""
    if len(between) != _END_64.size:
        return False
    mark, length, _, _, disk, of_disk, here, everywhere, size_64, start_64, locator, *points = (
        _END_64.unpack(between)
    )
    same = (here, everywhere, size_64, start_64) == (count, count, size, start)
    marks = (mark, locator) == (b"PK\x06\x06", b"PK\x06\x07")
    return (
        marks
        and same
        and length == 44
        and not disk
        and not of_disk
        and points == [0, start + size, 1]
    )


def _member(
    data: bytes, limit: int, entry: tuple[Any, ...], name: bytes, free: int
) -> tuple[int, int] | None:
    """Where the bytes of a member begin and end, behind what was read so far."""
    mark, _, version, flags, method, _, _, _, packed, size, _, extra = entry[:12]
    offset = entry[16]
    odd = mark != b"PK\x01\x02" or flags & ~_USUAL_FLAGS or version > _NEWEST
    if odd or extra or method or packed != size or offset < free or offset + _LOCAL.size > limit:
        return None
    local = _LOCAL.unpack_from(data, offset)
    begins = offset + _LOCAL.size
    if local[0] != b"PK\x03\x04" or local[3] != method or data[begins : begins + local[9]] != name:
        return None
    begins += local[9] + local[10]
    return (begins, begins + size) if begins + size <= limit else None

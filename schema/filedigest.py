"""Digests of plain bytes: of a whole file, and of the footer of a Parquet file."""

from __future__ import annotations

import os

from blake3 import blake3

_PIECE_BYTES = 1 << 18  # of larger ones, the memory is given back and got again each time
_MAGIC = b"PAR1"
FOOTER_LIMIT_BYTES = 16 << 20


def bytes_digest(data: bytes) -> str:
    """BLAKE3 of plain bytes, 64 hexadecimal digits."""
    return blake3(data).hexdigest()


def footer_digest(descriptor: int, size: int) -> str:
    """The digest of the end of a Parquet file: its metadata, their length and the magic bytes.

    A reader of Parquet trusts what it finds there, so that it is verified before.

    Args:
        descriptor: The open file.
        size: Its size in bytes.

    Returns:
        64 hexadecimal digits; nothing if it is not the end of a Parquet file of at most 16 MiB of
        metadata.
    """
    length = footer_bytes(os.pread(descriptor, 8, max(size - 8, 0)), size)
    return bytes_digest(os.pread(descriptor, length, size - length)) if length else ""


def footer_bytes(tail: bytes, size: int) -> int:
    """How long the footer of a Parquet file is, by the last 8 of its `size` bytes.

    Returns:
        Bytes from its metadata to the end; 0 if this is not the end of a Parquet file of at most
        16 MiB of metadata.
    """
    length = int.from_bytes(tail[:4], "little") + 8
    fits = tail[4:] == _MAGIC and length <= min(FOOTER_LIMIT_BYTES, size - 12) + 8
    return length if fits else 0


def file_digest(descriptor: int) -> str:
    """BLAKE3 of all bytes of an open file, 64 hexadecimal digits."""
    hasher, at = blake3(), 0
    while piece := os.pread(descriptor, _PIECE_BYTES, at):
        hasher.update(piece)
        at += len(piece)
    return str(hasher.hexdigest())

"""Logical digests of columns: equal for equal values, whatever the file layout.

BLAKE3 over a domain tag, the canonical type, the row count, then per nesting level the validity
bits, the lengths and the values of valid slots, each part preceded by its byte length. Slices,
chunks, dictionary encoding, list width, child names and hidden values under nulls do not count.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from trajreplay.schema.errors import SchemaError
from trajreplay.schema.lists import Int64s, elements, fixed_width_bytes, lengths_of

ALGORITHM = "blake3"
_DOMAIN = b"trajreplay/column/1"
_ALL_VALID = b"V"
_SOME_NULL = b"N"
_SMALL_BYTES = 4096


def column_digest(column: pa.Array | pa.ChunkedArray) -> str:
    """The logical digest of one column.

    Args:
        column: Values in row order.

    Returns:
        64 hexadecimal digits.

    Raises:
        SchemaError: The type is not one that a lake stores.

    >>> halves = pa.chunked_array([[1], [None]], pa.int64())
    >>> column_digest(pa.array([1, None])) == column_digest(halves)
    True
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if len(chunks) == 1 and (digest := _digest_at_once(chunks[0])) is not None:
        return digest
    hasher = _PartHasher()
    hasher.part(_DOMAIN)
    hasher.part(canonical_type(column.type).encode())
    hasher.part(len(column).to_bytes(8, "little"))
    _feed(hasher, [_plain(chunk) for chunk in chunks], _logical(column.type))
    return hasher.hexdigest()


def list_digest(column_type: pa.DataType, lengths: Int64s, values: Any) -> str:
    """The digest of a column of lists of numbers, without nulls, from its parts.

    Args:
        column_type: Of the lists.
        lengths: (S,) int64. How many values each list has.
        values: The values of all lists, as little-endian bytes.

    Returns:
        As `column_digest` of the lists.
    """
    return _of_lists(_plain_form(column_type)[1], lengths, values)


def _of_lists(prefix: bytes, lengths: Int64s, values: Any) -> str:
    rows = len(lengths)
    head = b"".join([prefix, _eight(rows), _VALID, _eight(8 * rows), lengths.tobytes(), _VALID])
    return _hashed(head, values)


def _hashed(head: bytes, content: Any) -> str:
    """The digest of what comes before the last part, its length, and that part."""
    size = len(content)
    if size <= _SMALL_BYTES:
        return str(blake3(b"".join((head, size.to_bytes(8, "little"), content))).hexdigest())
    hasher = blake3(head + size.to_bytes(8, "little"))
    hasher.update(content)
    return str(hasher.hexdigest())


def _digest_at_once(chunk: pa.Array) -> str | None:
    """The digest of one array without nulls, of numbers, lists of them or text; None of any other.

    The same parts as `_feed` makes, put together without a call for each.
    """
    shape, prefix = _plain_form(chunk.type)
    if shape is None or chunk.null_count:
        return None
    if shape == "list":
        values = elements(chunk)
        if values.null_count:
            return None
        return _of_lists(prefix, lengths_of(chunk), fixed_width_bytes(values))
    rows = len(chunk)
    head = prefix + _eight(rows) + _VALID
    if shape == "plain":
        return _hashed(head, fixed_width_bytes(chunk))
    _, places, data = chunk.buffers()
    ends = np.frombuffer(places, np.int32, rows + 1, chunk.offset * 4)
    lengths = np.subtract(ends[1:], ends[:-1], dtype=np.int64)
    head += _eight(8 * rows) + lengths.tobytes()
    return _hashed(head, memoryview(data)[int(ends[0]) : int(ends[-1])] if data else b"")


@cache
def _plain_form(column_type: pa.DataType) -> tuple[str | None, bytes]:
    """Whether a column is text, plain numbers or lists of them; and what its digest begins with.

    That is its domain, its type, and the length of the row count that follows.
    """
    prefix = _sized(_DOMAIN) + _sized(canonical_type(column_type).encode()) + _eight(8)
    if pa.types.is_string(column_type):
        return "text", prefix
    listed = _is_list(column_type)
    inner = column_type.value_type if listed else column_type
    if not _is_fixed(inner) or pa.types.is_boolean(inner):
        return None, prefix
    return "list" if listed else "plain", prefix


def _sized(part: bytes) -> bytes:
    return _eight(len(part)) + part


def _eight(number: int) -> bytes:
    return number.to_bytes(8, "little")


_VALID = _sized(_ALL_VALID)


@cache
def null_digest(column_type: pa.DataType, rows: int) -> str:
    """The digest of a column that a file lacks: as many nulls as it has rows."""
    return column_digest(pa.nulls(rows, column_type))


class _PartHasher:
    """BLAKE3 over parts, each preceded by its length, so that no two sequences run together."""

    def __init__(self) -> None:
        self._hasher = blake3()
        self._pending = bytearray()  # small pieces go together: a call costs as much as 4 KiB

    def part(self, *pieces: Any) -> None:
        """Feed one part, which may come in pieces."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        self._pending += sum(map(len, views)).to_bytes(8, "little")
        for view in views:
            if len(view) <= _SMALL_BYTES:
                self._pending += view
            else:
                self._flush()
                self._hasher.update(view)

    def _flush(self) -> None:
        if self._pending:
            self._hasher.update(self._pending)
            self._pending = bytearray()

    def hexdigest(self) -> str:
        """The digest of the parts so far, 64 hexadecimal digits."""
        self._flush()
        return str(self._hasher.hexdigest())


def _logical(column_type: pa.DataType) -> pa.DataType:
    return column_type.value_type if pa.types.is_dictionary(column_type) else column_type


def _plain(chunk: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(chunk.type):
        chunk = chunk.dictionary_decode()
    return chunk.cast(pa.large_string()) if pa.types.is_string_view(chunk.type) else chunk


@cache
def canonical_type(column_type: pa.DataType) -> str:
    """The logical type as text: without child names, list width, dictionary or view form.

    Raises:
        SchemaError: The type is not one that a lake stores.
    """
    kind = _logical(column_type)
    if _is_list(kind):
        return f"list<{canonical_type(kind.value_type)}>"
    if pa.types.is_struct(kind):
        children = (canonical_type(kind.field(i).type) for i in range(kind.num_fields))
        return f"struct<{','.join(children)}>"
    if _is_string(kind):
        return "string"
    if _is_fixed(kind):
        return str(kind)
    raise SchemaError(f"a lake cannot store the type {column_type}")


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_string(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_primitive(kind) and not pa.types.is_null(kind))


def _feed(hasher: _PartHasher, chunks: list[pa.Array], kind: pa.DataType) -> None:
    if any(chunk.null_count for chunk in chunks):
        valid = np.concatenate(
            [chunk.is_valid().to_numpy(zero_copy_only=False) for chunk in chunks]
        )
        hasher.part(_SOME_NULL, np.packbits(valid, bitorder="little"))
    else:
        hasher.part(_ALL_VALID)
    if _is_list(kind):
        hasher.part(*(lengths_of(chunk) for chunk in chunks))
        children = [_plain(elements(chunk)) for chunk in chunks]
        _feed(hasher, children, _logical(kind.value_type))
        return
    chunks = [chunk.drop_null() if chunk.null_count else chunk for chunk in chunks]
    if pa.types.is_struct(kind):
        columns = [chunk.flatten() for chunk in chunks]
        for index in range(kind.num_fields):
            child = [_plain(column[index]) for column in columns]
            _feed(hasher, child, _logical(kind.field(index).type))
    elif _is_string(kind):
        plain = [chunk.cast(pa.large_binary()) for chunk in chunks]
        hasher.part(*(np.diff(_offsets(chunk)) for chunk in plain))
        hasher.part(*(_bytes_between(chunk) for chunk in plain))
    elif pa.types.is_boolean(kind):
        bits = [chunk.to_numpy(zero_copy_only=False) for chunk in chunks]
        hasher.part(np.packbits(np.concatenate(bits or [np.empty(0, bool)]), bitorder="little"))
    else:
        hasher.part(*(fixed_width_bytes(chunk) for chunk in chunks))


def _offsets(chunk: pa.Array) -> Int64s:
    return np.frombuffer(chunk.buffers()[1], np.int64, len(chunk) + 1, chunk.offset * 8)


def _bytes_between(chunk: pa.Array) -> bytes | memoryview:
    offsets, data = _offsets(chunk), chunk.buffers()[2]
    return memoryview(data)[int(offsets[0]) : int(offsets[-1])] if data is not None else b""

"""Lists of an Arrow column: how long they are, where they lie, and the values in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

Int64s = np.ndarray[Any, np.dtype[np.int64]]
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def list_offsets(chunk: pa.Array) -> np.ndarray[Any, np.dtype[Any]]:
    """(S+1,) int32, or int64 of large lists. Where each list begins in `chunk.values`."""
    width = _INT64 if isinstance(chunk, pa.LargeListArray) else _INT32
    return np.frombuffer(chunk.buffers()[1], width, len(chunk) + 1, chunk.offset * width.itemsize)


def lengths_of(chunk: pa.Array) -> Int64s:
    """(S,) int64. The length of each list, 0 of a null one."""
    offsets = list_offsets(chunk)
    lengths: Int64s = np.subtract(offsets[1:], offsets[:-1], dtype=np.int64)
    if chunk.null_count:
        lengths[~chunk.is_valid().to_numpy(zero_copy_only=False)] = 0
    return lengths


def elements(chunk: pa.Array) -> pa.Array:
    """The values of valid rows of a list array, without a copy where every row is valid."""
    if chunk.null_count:
        return chunk.flatten()
    offsets = list_offsets(chunk)
    start, stop = int(offsets[0]), int(offsets[-1])
    values = chunk.values
    return values if stop - start == len(values) else values.slice(start, stop - start)


def list_place(column: pa.ChunkedArray) -> tuple[tuple[int, int, int], ...] | None:
    """Where the offsets of a list column lie in memory; None of one with null lists.

    Columns of one place have lists of the same lengths.
    """
    if column.null_count:
        return None
    return tuple((one.buffers()[1].address, one.offset, len(one)) for one in column.chunks)


class ListBounds:
    """Where lists of given lengths begin.

    Attributes:
        lengths: (S,) int64. As given.
        count: Values of all lists; -1 where a length is missing or negative, or they are too many
            for a list array.
        offsets: (S+1,) int32 array for a list array, if they are not.
    """

    def __init__(self, lengths: pa.ChunkedArray) -> None:
        self.count = -1
        if lengths.null_count:
            return
        parts = [chunk.to_numpy() for chunk in lengths.chunks]
        together = parts[0] if len(parts) == 1 else np.concatenate([*parts, []])
        self.lengths = together.astype(np.int64)
        rows = len(self.lengths)
        ends = np.zeros(rows + 1, np.int64)
        np.add.accumulate(self.lengths, out=ends[1:])
        if ends[-1] < 2**31 and (not rows or self.lengths.min() >= 0):
            self.count = int(ends[-1])
            buffer = pa.py_buffer(ends.astype(np.int32))
            self.offsets = pa.Array.from_buffers(pa.int32(), rows + 1, [None, buffer])


def fixed_width_bytes(chunk: pa.Array) -> bytes | memoryview:
    """The values of a fixed-width array as their little-endian bytes, without a copy."""
    data = chunk.buffers()[1]
    if data is None or not len(chunk):
        return b""
    width = chunk.type.bit_width // 8
    start = chunk.offset * width
    return memoryview(data).cast("B")[start : start + len(chunk) * width]


def non_finite(values: pa.Array) -> int:
    """How many values of an array of floats are NaN or infinite; nulls are neither."""
    return non_finite_of((values.drop_null() if values.null_count else values).to_numpy())


def non_finite_of(numbers: np.ndarray[Any, np.dtype[Any]]) -> int:
    """How many of some floats are NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.add.reduce(numbers)):  # then so is every one of them
            return 0
    return int(np.count_nonzero(~np.isfinite(numbers)))


_SMALL_BYTES = 4096


def small_content(array: pa.Array) -> tuple[bytes | None, ...] | None:
    """The buffers of an array without lists, if they are small: what is made of it may be kept.

    Many columns of a capture, such as its keys, are those of the capture before.
    """
    if array.offset or array.type.num_fields or buffer_bytes(array) > _SMALL_BYTES:
        return None
    return tuple([None if one is None else one.to_pybytes() for one in array.buffers()])


def buffer_bytes(array: pa.Array) -> int:
    """The bytes of all buffers of an array, slices of it apart: `nbytes` takes far longer."""
    return sum([one.size for one in array.buffers() if one is not None])


def of_content(kind: pa.DataType, rows: int, content: tuple[bytes | None, ...]) -> pa.Array:
    """The array that has these buffers."""
    buffers = [None if one is None else pa.py_buffer(one) for one in content]
    return pa.Array.from_buffers(kind, rows, buffers)

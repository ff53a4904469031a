"""Flat values as a list column, in the column's declared type and without a changed bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.columns import Column, Table
from trajreplay.schema.dtypes import widen_bfloat16, widen_float16
from trajreplay.schema.errors import CaptureError, named
from trajreplay.schema.tables import OWN_LENGTH, length_column
from trajreplay.writer.flatten import PLAIN, Array, Flat, flatten


@dataclass(frozen=True)
class ListColumn:
    """One list column of a capture.

    Args:
        column: Its declaration.
        values: Values of all rows, in the declared type.
        lengths: Values of each row, 0 for a row without.
        valid: False where a row has no values at all; None if every row has.
        source_dtype: dtype that the producer held.
    """

    column: Column
    values: Array
    lengths: Array
    valid: Array | None
    source_dtype: str

    @property
    def all_null(self) -> bool:
        """Whether no row has values, so that the column is left out of the file."""
        return self.valid is not None and not self.valid.any()

    @cached_property
    def offsets(self) -> Array:
        """Start of each row among the values, 64 bits wide, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def rows(self, start: int, stop: int) -> pa.Array:
        """Rows as an Arrow list; its offsets are its own, so only these rows have to fit them."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        values = np.ascontiguousarray(self.values[first:last])
        offsets = (self.offsets[start : stop + 1] - first).astype(np.int32)
        child = pa.Array.from_buffers(
            self.column.type.value_type, len(values), [None, pa.py_buffer(values)]
        )
        bitmap = None
        if self.valid is not None:
            bitmap = pa.py_buffer(np.packbits(self.valid[start:stop], bitorder="little"))
        buffers = [bitmap, pa.py_buffer(offsets)]
        return pa.Array.from_buffers(self.column.type, stop - start, buffers, children=[child])


def tensor_column(table: Table, name: str) -> Column:
    """The declaration of a column of per-token values.

    Raises:
        CaptureError: The table has no such column, or it is not handed over as a tensor.
    """
    tensors = [one.name for one in table.having("input", "output") if one.is_list]
    names = [one for one in tensors if one != "loss_mask" and one not in OWN_LENGTH]
    if name not in names:
        raise CaptureError(
            f"unknown tensor {named(name)}, expected one of {', '.join(names)}",
            hint="Masks, rewards and ids come with the samples, scalars with expected().",
            column=name,
        )
    return table[name]


def encode_column(
    column: Column, values: Any, lengths: Array | None = None, held: Array | None = None
) -> ListColumn:
    """Bring values, packed or one tensor per row, into a column's declared type.

    Args:
        column: The declared column.
        values: torch, numpy or Arrow values, or Python lists of numbers; None is a row without.
        lengths: Values that each row must have if they come packed, where that is known.
        held: Values that it has instead where they are those of a context-parallel shard.

    Raises:
        CaptureError: They have no such form, do not fit the column's type exactly, or come packed
            with another sum of lengths, or before the lengths are known.
    """
    flat = flatten(column.name, values)
    typed = _typed(column, flat)
    found = flat.lengths
    if found is None:
        is_shard = held is not None and len(typed) == held.sum()
        found = _packed_lengths(column, typed, held if is_shard else lengths)
    dtype = flat.dtype if flat.dtype != PLAIN else typed.dtype.name
    return ListColumn(column, typed, found, flat.valid, dtype)


def _packed_lengths(column: Column, values: Array, lengths: Array | None) -> Array:
    name = column.name
    if lengths is None:
        raise CaptureError(
            f"{name} is packed, and the samples are not known yet",
            hint="Call samples() before, or give a list with one tensor per sample.",
            column=name,
        )
    if len(values) != lengths.sum():
        raise CaptureError(
            f"{name} has {len(values)} packed values, expected {lengths.sum()}: the sum of "
            f"{length_column(name)} of {len(lengths)} samples",
            hint="Give a list with one tensor per sample to see which differs.",
            column=name,
        )
    return lengths


def _typed(column: Column, flat: Flat) -> Array:
    """The values in the column's type, which must hold each of them exactly."""
    target = np.dtype(column.type.value_type.to_pandas_dtype())
    values = flat.values
    if flat.dtype == "bfloat16":
        values = widen_bfloat16(values)
    elif flat.dtype == "float16":
        values = widen_float16(values)
    if values.dtype == target:
        return values if flat.fresh or values is not flat.values else values.copy()
    if values.dtype.kind not in "biuf":
        raise CaptureError(f"{column.name} has the dtype {flat.dtype}, expected numbers")
    with np.errstate(invalid="ignore", over="ignore"):
        cast = values.astype(target)
        back = cast.astype(values.dtype)
    rounded = flat.dtype == PLAIN and target.kind == "f"
    same = np.isfinite(cast) | ~np.isfinite(values) if rounded else _same_bits(back, values)
    if not same.all():
        raise _inexact(column, flat, values, np.flatnonzero(~same))
    return cast


def _inexact(column: Column, flat: Flat, values: Array, wrong: Array) -> CaptureError:
    first, where = int(wrong[0]), ""
    if flat.lengths is not None:
        row = int(np.searchsorted(np.cumsum(flat.lengths), first, side="right"))
        where = f" of row {row}"
    expected = "float32" if column.is_floating else column.type.value_type
    return CaptureError(
        f"{column.name} has {len(wrong)} values that {expected} cannot hold exactly, the first"
        f"{where} is {values[first].item()!r} of {flat.dtype}",
        hint=f"Cast them to what the trainer computes with, at most {expected}.",
        column=column.name,
    )


def _same_bits(left: Array, right: Array) -> Array:
    if left.dtype.kind != "f":
        return np.asarray(left == right)
    return np.asarray(left.view(f"u{left.itemsize}") == right.view(f"u{right.itemsize}"))

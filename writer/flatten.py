"""Tensors of any make laid out flat: values in row order, with the length of each row."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.errors import CaptureError

Array = np.ndarray[Any, np.dtype[Any]]
PLAIN = "python"  # dtype of Python numbers, which take the column's type as in torch.tensor


@dataclass(frozen=True)
class Flat:
    """Values of all rows one after another, before they take the column's type.

    Args:
        values: One-dimensional; bfloat16 as its bits, uint16.
        dtype: Name of the dtype that the producer held.
        lengths: Values of each row; None for a packed tensor, which does not say.
        valid: False where a row has no values at all; None if every row has.
        fresh: Whether the values are a copy already, or such as nobody else can change.
    """

    values: Array
    dtype: str
    lengths: Array | None = None
    valid: Array | None = None
    fresh: bool = False


def flatten(name: str, values: Any) -> Flat:
    """Lay values out one after another, whatever holds them.

    Raises:
        CaptureError: They have no form that this function knows.
    """
    if (tensors := _torch_of([values])) is not None:
        return _by_shape(name, *tensors[0])
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return _flatten_arrow(name, values)
    if isinstance(values, np.ndarray) and values.dtype != object:
        return _by_shape(name, values, values.shape)
    if isinstance(values, (Sequence, np.ndarray)) and not isinstance(values, (str, bytes)):
        return _flatten_rows(name, values)
    raise CaptureError(
        f"{name} is a {type(values).__name__}, expected a tensor, array or list",
        hint="Give one packed tensor of all samples, or a list with one per sample.",
        column=name,
    )


def _by_shape(name: str, values: Any, shape: tuple[int, ...]) -> Flat:
    """One dimension is packed; two are rows of equal length."""
    flat, dtype = _bits(values)
    lasting = _never_changes(values)
    if len(shape) == 1:
        return Flat(flat, dtype, fresh=lasting)
    if len(shape) == 2:
        lengths = np.full(shape[0], shape[1], np.int64)
        return Flat(flat.reshape(-1), dtype, lengths, fresh=lasting)
    raise CaptureError(
        f"{name} has {len(shape)} dimensions, expected 1 (packed) or 2 (one row a sample)",
        hint="Give one packed tensor of all samples, or a list with one per sample.",
        column=name,
    )


def _never_changes(values: Any) -> bool:
    """Whether values lie in an object of bytes, which nobody can change."""
    base = values
    while isinstance(base, np.ndarray):
        base = base.base
    held = base.obj if isinstance(base, memoryview) else base
    return type(held) is bytes and bool(values.flags.aligned)


def _torch_of(values: Sequence[Any]) -> list[tuple[Any, tuple[int, ...]]] | None:
    """Each value detached, with its shape, if all are torch tensors; torch is never loaded here."""
    torch = sys.modules.get("torch")
    if torch is None or not all(isinstance(one, torch.Tensor) for one in values):
        return None
    return [(one.detach(), tuple(one.shape)) for one in values]


def _bits(values: Any) -> tuple[Array, str]:
    """A numpy array of the same bits, and the name of the dtype."""
    if isinstance(values, np.ndarray):
        if values.dtype.name == "bfloat16":  # of ml_dtypes
            return values.view(np.uint16), "bfloat16"
        return values, values.dtype.name
    import torch

    on_host = values.cpu().contiguous()
    dtype = str(on_host.dtype).removeprefix("torch.")
    if on_host.dtype == torch.bfloat16:
        return on_host.view(torch.int16).numpy().view(np.uint16), dtype
    try:
        return on_host.numpy(), dtype
    except TypeError as error:
        raise CaptureError(f"a tensor has the dtype {dtype}, which a lake cannot store") from error


def _flatten_rows(name: str, rows: Sequence[Any] | Array) -> Flat:
    """One value, list or tensor per row."""
    present = [one for one in rows if one is not None]
    valid = np.array([one is not None for one in rows]) if len(present) < len(rows) else None
    if present and all(isinstance(one, (int, float, np.generic)) for one in present):
        if valid is not None:
            raise CaptureError(f"{name} has None among the values of a packed list", column=name)
        return Flat(np.asarray(present), PLAIN)
    tensors = _torch_of(present)
    if tensors:
        return _flatten_tensors(name, tensors, valid)
    alike = _alike(present)
    if alike is not None:
        flat, dtype = _bits(alike)
        lengths = np.fromiter(map(len, present), np.int64, len(present))
        return Flat(flat, dtype, _spread(lengths, valid), valid, fresh=True)
    pieces = [_piece(name, one) for one in present]
    dtypes = {dtype for values, dtype in pieces if len(values)}
    dtypes = dtypes or {dtype for _, dtype in pieces[:1]} or {PLAIN}
    _refuse_mixture(name, dtypes)
    lengths = np.fromiter((len(values) for values, _ in pieces), np.int64, len(pieces))
    flat = np.concatenate([values for values, _ in pieces if len(values)] or [np.empty(0)])
    return Flat(flat, dtypes.pop(), _spread(lengths, valid), valid, fresh=True)


def _alike(rows: Sequence[Any]) -> Array | None:
    """Rows that are arrays of one dtype, one after another; None for any others."""
    if not rows or set(map(type, rows)) != {np.ndarray}:
        return None
    kinds = {(one.dtype, one.ndim) for one in rows}
    return np.concatenate(rows) if len(kinds) == 1 and rows[0].ndim == 1 else None


def _flatten_tensors(
    name: str, tensors: list[tuple[Any, tuple[int, ...]]], valid: Array | None
) -> Flat:
    import torch

    _refuse_mixture(name, {str(one.dtype).removeprefix("torch.") for one, _ in tensors})
    for _, shape in tensors:
        _refuse_shape(name, len(shape))
    lengths = np.fromiter((shape[0] for _, shape in tensors), np.int64, len(tensors))
    one_device = len({one.device for one, _ in tensors}) == 1
    flat, dtype = _bits(torch.cat([one if one_device else one.cpu() for one, _ in tensors]))
    return Flat(flat, dtype, _spread(lengths, valid), valid, fresh=True)


def _piece(name: str, values: Any) -> tuple[Array, str]:
    """The values of one row."""
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        flat = _flatten_arrow(name, values)
        return flat.values, flat.dtype
    if (tensors := _torch_of([values])) is not None:
        values = tensors[0][0]
    elif not isinstance(values, np.ndarray):
        if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
            raise CaptureError(
                f"{name} has a {type(values).__name__} for a sample, expected its values",
                column=name,
            )
        return _numbers(name, list(values)), PLAIN
    _refuse_shape(name, values.ndim)
    return _bits(values)


def _numbers(name: str, values: list[Any]) -> Array:
    try:
        return np.frombuffer(bytes(values), np.uint8)  # masks: several times faster than np.array
    except (TypeError, ValueError):
        pass
    array = np.array(values)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise CaptureError(
            f"{name} has a list of {array.dtype} for a sample, expected numbers", column=name
        )
    return array


def _flatten_arrow(name: str, values: pa.Array | pa.ChunkedArray) -> Flat:
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    kind = values.type
    nested = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    inner = [chunk.flatten() for chunk in chunks] if nested else chunks
    value_type = kind.value_type if nested else kind
    if any(chunk.null_count for chunk in inner):
        raise CaptureError(f"{name} has null elements, expected a value each", column=name)
    if not (pa.types.is_primitive(value_type) or pa.types.is_boolean(value_type)):
        raise CaptureError(f"{name} has the Arrow type {kind}, expected numbers", column=name)
    arrays = [chunk.to_numpy(zero_copy_only=False) for chunk in inner]
    flat = np.concatenate(arrays or [np.empty(0, value_type.to_pandas_dtype())])
    if not nested:
        return Flat(flat, flat.dtype.name, fresh=True)
    lengths = [chunk.value_lengths().fill_null(0).to_numpy() for chunk in chunks]
    valid = None
    if values.null_count:
        valid = np.concatenate([one.is_valid().to_numpy(zero_copy_only=False) for one in chunks])
    joined = np.concatenate(lengths or [np.empty(0, np.int64)]).astype(np.int64)
    if valid is not None:
        joined[~valid] = 0
    return Flat(flat, flat.dtype.name, joined, valid, fresh=True)


def _spread(lengths: Array, valid: Array | None) -> Array:
    """Lengths of the rows that have values, with 0 for the others."""
    if valid is None:
        return lengths
    spread = np.zeros(len(valid), np.int64)
    spread[valid] = lengths
    return spread


def _refuse_mixture(name: str, dtypes: set[str]) -> None:
    if len(dtypes) > 1:
        raise CaptureError(
            f"{name} has samples of several dtypes: {', '.join(sorted(dtypes))}; expected one",
            hint="Cast them to the dtype that the trainer computes with.",
            column=name,
        )


def _refuse_shape(name: str, dimensions: int) -> None:
    if dimensions != 1:
        raise CaptureError(
            f"{name} has a sample with {dimensions} dimensions, expected 1: its response tokens",
            hint="Take the sample's row and cut it to its response.",
            column=name,
        )

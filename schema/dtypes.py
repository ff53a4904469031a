"""Half-precision floats as float32 and back, by bits: every NaN keeps its payload."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajreplay.schema.errors import SchemaError

Floats = np.ndarray[Any, np.dtype[np.float32]]
Values = np.ndarray[Any, np.dtype[Any]]

_SIGN16, _NAN32, _MANTISSA16 = np.uint32(0x8000), np.uint32(0x7F800000), np.uint32(0x03FF)
_MANTISSA_SHIFT = np.uint32(13)  # float32 has 23 bits of mantissa, float16 has 10
_HALF_WORD = np.uint32(16)


def widen_bfloat16(bits: Values) -> Floats:
    """Bfloat16 as float32, from the bits of the former; exact for every pattern.

    Args:
        bits: uint16, the bits of bfloat16 values.
    """
    return (bits.astype(np.uint32) << _HALF_WORD).view(np.float32)


def widen_float16(values: Values) -> Floats:
    """Float16 as float32; a conversion would set the quiet bit of signalling NaNs."""
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float32)
    nan = np.isnan(values)
    if nan.any():
        bits = values[nan].view(np.uint16).astype(np.uint32)
        sign = (bits & _SIGN16) << _HALF_WORD
        wide.view(np.uint32)[nan] = sign | _NAN32 | (bits & _MANTISSA16) << _MANTISSA_SHIFT
    return wide


def restore(values: Values, source_dtype: str) -> Values:
    """The values as the producer held them, bit for bit.

    Args:
        values: What a lake stores: float32, int32 or uint8.
        source_dtype: dtype that the entry names for the column.

    Returns:
        An array of that dtype; for bfloat16, which numpy lacks, its bits as uint16.

    Raises:
        SchemaError: The dtype is not one that a column was recorded from.

    >>> restore(np.array([1.5], np.float32), "bfloat16")
    array([16320], dtype=uint16)
    """
    if source_dtype == "bfloat16":
        return (values.view(np.uint32) >> _HALF_WORD).astype(np.uint16)
    if source_dtype != "float16":
        try:
            return values.astype(np.dtype(source_dtype), copy=False)
        except TypeError as error:
            raise SchemaError(f"{source_dtype!r} is no dtype that a lake records") from error
    with np.errstate(invalid="ignore", over="ignore"):
        narrow = values.astype(np.float16)
    nan = np.isnan(values)
    if nan.any():
        bits = values[nan].view(np.uint32)
        sign = (bits >> _HALF_WORD) & _SIGN16
        exponent = np.uint32(0x7C00)
        payload = (bits >> _MANTISSA_SHIFT) & _MANTISSA16
        narrow.view(np.uint16)[nan] = (sign | exponent | payload).astype(np.uint16)
    return narrow

"""Half-precision floats: every one of their 65,536 patterns survives the way into float32."""

import numpy as np
import pytest

from trajreplay.schema.dtypes import restore, widen_bfloat16, widen_float16
from trajreplay.schema.errors import SchemaError

PATTERNS = np.arange(2**16, dtype=np.uint32).astype(np.uint16)


def test_every_bfloat16_comes_back() -> None:
    wide = widen_bfloat16(PATTERNS)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(restore(wide, "bfloat16"), PATTERNS)


def test_every_float16_comes_back() -> None:
    wide = widen_float16(PATTERNS.view(np.float16))
    np.testing.assert_array_equal(restore(wide, "float16").view(np.uint16), PATTERNS)


def test_a_widened_value_is_the_same_number() -> None:
    import torch

    bits = torch.from_numpy(PATTERNS.view(np.int16).copy())
    for dtype, wide in (
        (torch.bfloat16, widen_bfloat16(PATTERNS)),
        (torch.float16, widen_float16(PATTERNS.view(np.float16))),
    ):
        expected = bits.view(dtype).float().numpy()
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(wide[number], expected[number])
        np.testing.assert_array_equal(np.isnan(wide), np.isnan(expected))


def test_other_dtypes_are_restored_by_conversion() -> None:
    assert restore(np.array([1, 2], np.int32), "int64").dtype == np.int64
    assert restore(np.array([0, 1], np.uint8), "bool").tolist() == [False, True]


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(SchemaError, match="'float8_e4m3fn' is no dtype"):
        restore(np.zeros(1, np.float32), "float8_e4m3fn")

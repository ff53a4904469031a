"""Envelopes of routed experts: in and out bit for bit, and nothing else is taken for one."""

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay import TrajReplayError
from trajreplay.schema.bundles.r3 import decode_envelope, encode_envelope


@given(data=st.data(), dtype=st.sampled_from(["int8", "int16", "int32"]))
def test_routes_come_out_as_they_went_in(data: st.DataObject, dtype: str) -> None:
    shape = tuple(data.draw(st.integers(0, 4)) for _ in range(3))
    limits = np.iinfo(dtype)
    count = int(np.prod(shape))
    values = data.draw(
        st.lists(st.integers(int(limits.min), int(limits.max)), min_size=count, max_size=count)
    )
    routes = np.array(values, dtype).reshape(shape)
    text = encode_envelope(routes)
    size = "x".join(map(str, shape))
    packed = base64.b64encode(routes.tobytes()).decode()
    assert text == f"nrlre1:{dtype}:{size}:{packed}"
    back = decode_envelope(text)
    assert back.dtype == routes.dtype
    assert back.shape == shape
    assert np.array_equal(back, routes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "begins with ''"),
        ("nrlre2:int8:1x1x1:AA==", "begins with 'nrlre2"),
        ("nrlre1:int8:1x1:AA==", "begins with"),
        ("nrlre1:int8:-1x1x1:AA==", "begins with"),
        ("nrlre1:uint16:2x1x1:AAAA", "holds 'uint16'"),
        ("nrlre1:int8:1x1x1:AAA=", "holds 2 bytes, expected 1"),
        ("nrlre1:int8:1x1x1:AA=", "3 characters"),
        ("nrlre1:int8:3x1x1:AA@A", "no base64"),
        ("nrlre1:int8:9999999999x9x9:AA==", "4 characters"),
        ("nrlre1:int16:2x1x2:AAABAAIAAwA", "11 characters"),
        ("nrlre1:int8:0x9999999999x9999999999:", "at most 1048576 choices"),
        ("nrlre1:int8:0x1x1048577:", "at most 1048576 choices"),
    ],
)
def test_what_is_no_envelope_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(TrajReplayError) as error:
        decode_envelope(text)
    assert message in error.value.message


@pytest.mark.parametrize("routes", [np.zeros((2, 2), np.int8), np.zeros((1, 1, 1), np.int64)])
def test_what_no_envelope_holds_is_refused(routes: Any) -> None:
    with pytest.raises(TrajReplayError, match="expected three dimensions"):
        encode_envelope(routes)


@given(st.data())
def test_a_changed_character_is_no_traceback(data: st.DataObject) -> None:
    text = list(encode_envelope(np.arange(12, dtype=np.int16).reshape(3, 2, 2)))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.characters(codec="utf-8"))
    try:
        found = decode_envelope("".join(text))
    except TrajReplayError:
        return
    assert found.size * found.itemsize == 24

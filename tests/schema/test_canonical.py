"""Signed JSON: exact floats, and no byte of it may change."""

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies import any_float64
from trajreplay.schema.canonical import (
    MAX_BYTES,
    MAX_DEPTH,
    dump_signed,
    load_signed,
    read_float,
    write_float,
)
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.filedigest import bytes_digest


def signed(body: bytes) -> bytes:
    """Sign text that `dump_signed` would not write: an object without its closing brace."""
    return body + b',"~blake3":"' + bytes_digest(body).encode() + b'"}'


def nested(depth: int) -> dict[str, Any]:
    tree: Any = 1
    for _ in range(depth):
        tree = {"a": tree}
    return dict(tree)


@given(any_float64())
def test_every_float_comes_back_bit_for_bit(value: float) -> None:
    back = read_float(json.loads(json.dumps(write_float(value))))
    assert struct.pack("<d", back) == struct.pack("<d", value)


@pytest.mark.parametrize(
    "text",
    # Python reads the first three of these as hexadecimal digits.
    [
        "10",
        "a",
        "-b",
        "1e3",
        "nan",
        "infinite",
        "nan:3ff0000000000000",
        "nan:7f",
        "",
        "1.0.0",
        "0x1p9999",
        10**400,
        None,
        True,
        [],
    ],
)
def test_what_is_no_float_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r".*"):
        read_float(text)


_VALUES = st.text() | st.integers() | st.lists(st.booleans())


@given(st.dictionaries(st.text(), _VALUES, min_size=1, max_size=4))
def test_a_tree_comes_back_and_its_keys_are_sorted(tree: dict[str, Any]) -> None:
    data = dump_signed(tree)
    back = load_signed(data, "x.json")
    assert {key: back[key] for key in tree} == tree
    assert json.loads(data).keys() == {*tree, "~blake3"} or "~blake3" in tree
    assert dump_signed(dict(reversed(tree.items()))) == data


def test_a_changed_byte_names_the_file() -> None:
    data = dump_signed({"a": 1}).replace(b":1", b":2")
    with pytest.raises(DatasetError, match=r"x\.json: its bytes do not have the digest"):
        load_signed(data, "x.json")


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1,"a":2',
        b'{"a" :1,"a":2',
        b'{"a"\n:1,"a":2',
        b'{"a":{"b":":","b":1}',
        b'{"\\u0061":1,"a":2',
        b'{"a":{"x":1,"x":":"},"b":2',
    ],
)
def test_a_key_that_occurs_twice_is_refused(body: bytes) -> None:
    with pytest.raises(DatasetError, match="same key twice"):
        load_signed(signed(body), "x.json")


@pytest.mark.parametrize("value", ['":"', '": "', '"a\\":"', '"\\"\\":1"', '" :"', "[]", "{}"])
def test_text_that_looks_like_a_key_is_not_taken_for_one(value: str) -> None:
    body = f'{{"a":{value}'.encode()
    assert load_signed(signed(body), "x.json")["a"] == json.loads(value)


@pytest.mark.parametrize("body", [b'{"a":NaN', b'{"a":-Infinity', b'{"a":', b'{"a":\xff', b'["a"'])
def test_what_is_not_standard_json_is_refused(body: bytes) -> None:
    with pytest.raises(DatasetError, match="not standard JSON"):
        load_signed(signed(body), "x.json")


@pytest.mark.parametrize("excess", [0, 1, 5])
def test_nesting_is_bounded(excess: int) -> None:
    body = json.dumps(nested(MAX_DEPTH + excess), separators=(",", ":")).encode()[:-1]
    if excess == 0:
        assert load_signed(signed(body), "x.json")["a"]
        return
    with pytest.raises(DatasetError, match="at most 16 deep"):
        load_signed(signed(body), "x.json")


def test_an_empty_object_counts_as_a_level() -> None:
    body = json.dumps(nested(MAX_DEPTH), separators=(",", ":")).replace("1", "{}").encode()[:-1]
    with pytest.raises(DatasetError, match="at most 16 deep"):
        load_signed(signed(body), "x.json")


def test_nesting_beyond_what_the_parser_takes_is_refused() -> None:
    body = b'{"a":' + b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(DatasetError, match="not standard JSON"):
        load_signed(signed(body), "x.json")


def test_size_is_bounded_before_anything_is_parsed() -> None:
    with pytest.raises(DatasetError, match=f"expected at most {MAX_BYTES}"):
        load_signed(b"x" * (MAX_BYTES + 1), "x.json")


def test_infinities_have_names() -> None:
    assert (write_float(math.inf), write_float(-math.inf)) == ("inf", "-inf")

"""Lists of 0 and 1 that are read as arrays: the same numbers, and nothing else is taken for one."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.schema import DatasetError
from trajreplay.schema.bundles.bit_lists import without_bit_lists
from trajreplay.schema.bundles.strict_json import load_object

NAME = "loss_mask"
TEXTS = st.text(st.sampled_from('"\\loss_mask:[]01, a'), max_size=24)
BITS = st.lists(st.integers(0, 1), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | TEXTS | BITS | st.lists(TEXTS, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([NAME, "a", f'"{NAME}', f"{NAME}\\"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """A tree with its arrays as lists again."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


@given(
    st.dictionaries(st.sampled_from([NAME, "samples", "a"]), VALUES),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([(", ", ": "), (",", ":"), (" ,\t", "\n:")]),
)
def test_a_tree_is_the_same_with_and_without(
    tree: dict[str, Any], indent: int | None, separators: tuple[str, str]
) -> None:
    text = json.dumps(tree, indent=indent, separators=separators).encode()
    assert plain(load_object(text, "x", bits=NAME)) == tree == load_object(text, "x")


SPACES = st.text(st.sampled_from(" \t\r\n"), max_size=3)


@given(st.lists(st.integers(0, 1), min_size=1), SPACES, SPACES, SPACES)
def test_a_list_becomes_an_array_of_bytes(
    bits: list[int], around: str, before: str, after: str
) -> None:
    text = f"{before},{after}".join(map(str, bits))
    whole = f'{{"{NAME}"{before}:{after}[{around}{text}{around}]}}'.encode()
    found = load_object(whole, "x", bits=NAME)[NAME]
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.tolist()) == (np.uint8, bits)


@pytest.mark.parametrize(
    "text",
    [
        *("[0 1]", "[01]", "[0,,1]", "[0,]", "[,0]", "[2]", "[0, 1", "[0.0]", "[true]", "[-0]"),
        *("[0\\v, 1]", "[0\v,0]", "[\f0, 0]", "[0, 0\f]", "[0, 0, 0 0]"),
        *("[0x1]", "[[0]]", '["0"]', "[]"),
    ],
)
def test_anything_else_is_left_to_the_decoder(text: str) -> None:
    whole = f'{{"{NAME}": {text}}}'.encode()
    assert without_bit_lists(whole, NAME) == (whole, {})


def test_a_key_that_is_there_twice_is_refused() -> None:
    text = f'{{"{NAME}": [0], "{NAME}": [1]}}'.encode()
    with pytest.raises(DatasetError, match="the same key twice"):
        load_object(text, "x", bits=NAME)


@pytest.mark.parametrize("first", ["", "0", "0,0"])
@pytest.mark.parametrize("end", [b"", b"]"])
def test_each_byte_is_searched_once(first: str, end: bytes) -> None:
    """Minutes, were each label to look for the end of its list past the next."""
    whole = f'"{NAME}":[{first}'.encode() * 300_000 + end
    assert without_bit_lists(whole, NAME) == (whole, {})


@given(st.lists(st.lists(st.integers(0, 1), min_size=1), min_size=2), st.data())
def test_lists_of_one_text_may_be_spaced_differently(
    lists: list[list[int]], data: st.DataObject
) -> None:
    texts = []
    for bits in lists:
        comma = data.draw(st.sampled_from([",", ", ", " ,", ",\n  "]))
        texts.append(f'{{"{NAME}": [{comma.join(map(str, bits))}]}}')
    whole = f'{{"samples": [{", ".join(texts)}]}}'.encode()
    found = load_object(whole, "x", bits=NAME)["samples"]
    assert [one[NAME].tolist() for one in found] == lists


@pytest.mark.parametrize("odd", ["2", "0 1", "0,", "true", "-1", "0.0", "0,\v1", "0,0,1 0"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_list_of_something_else_keeps_its_text_and_the_others_are_read(odd: str, at: int) -> None:
    lists = ["0, 1, 1", "1", "0, 0"]
    lists[at] = odd
    text = ",".join(f'{{"{NAME}": [{one}]}}' for one in lists).encode()
    left, found = without_bit_lists(text, NAME)
    assert f"[{odd}]".encode() in left
    assert [one.tolist() for one in found.values()] == [
        [int(bit) for bit in one.split(", ")] for one in lists if one != odd
    ]


@given(VALUES, st.sampled_from([(", ", ": "), (",", ":"), (",", " :"), (",", "\n: ")]))
def test_a_key_that_is_there_twice_is_refused_wherever_it_is(
    value: Any, separators: tuple[str, str]
) -> None:
    inner = json.dumps({"a": value}, separators=separators)
    twice = f"{inner[:-1]},{inner[1:]}"
    for text in (twice, f'{{"b":[0,{twice}]}}', f'{{"b":[[{twice}]], "c": "\\":"}}'):
        with pytest.raises(DatasetError, match="the same key twice"):
            load_object(text.encode(), "x")
        with pytest.raises(DatasetError, match="the same key twice"):
            load_object(text.encode(), "x", bits=NAME)


@pytest.mark.parametrize("text", [b"true", b"1", b'"a"', b"null", b"[]", b"[1]", b'[{"a":1}]', b""])
@pytest.mark.parametrize("bits", ["", NAME])
def test_what_is_no_object_is_refused(text: bytes, bits: str) -> None:
    with pytest.raises(DatasetError, match="not standard JSON of one object"):
        load_object(text, "x", bits=bits)

"""Logical digests: golden vectors, and what does and does not count."""

import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies import patterns
from trajreplay.schema.columns import list_of
from trajreplay.schema.digest import canonical_type, column_digest, null_digest
from trajreplay.schema.errors import SchemaError
from trajreplay.schema.tables import SPANS, TABLES

FLOATS = list_of(pa.float32())


def bits(values: list[bool]) -> bytes:
    return np.packbits(np.array(values, bool), bitorder="little").tobytes()


def reference(kind: pa.DataType, values: list[Any]) -> str:
    """The digest as the format has it, over Python values and without Arrow's buffers."""
    parts = [b"trajreplay/column/1", canonical_type(kind).encode(), struct.pack("<q", len(values))]
    _level(kind, values, parts)
    hasher = blake3()
    for part in parts:
        hasher.update(struct.pack("<q", len(part)) + part)
    return hasher.hexdigest()


def _level(kind: pa.DataType, values: list[Any], parts: list[bytes]) -> None:
    valid = [value is not None for value in values]
    parts.append(b"V" if all(valid) else b"N" + bits(valid))
    if pa.types.is_list(kind):
        lengths = [0 if value is None else len(value) for value in values]
        parts.append(struct.pack(f"<{len(values)}q", *lengths))
        inner = [one for value in values if value is not None for one in value]
        _level(kind.value_type, inner, parts)
        return
    present = [value for value in values if value is not None]
    if pa.types.is_struct(kind):
        for field in kind:
            _level(field.type, [value[field.name] for value in present], parts)
    elif pa.types.is_string(kind):
        texts = [value.encode() for value in present]
        parts.append(struct.pack(f"<{len(texts)}q", *map(len, texts)))
        parts.append(b"".join(texts))
    elif pa.types.is_boolean(kind):
        parts.append(bits(present))
    else:
        parts.append(np.array(present, kind.to_pandas_dtype()).tobytes())


VECTORS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "int32": (pa.int32(), [1, None, -1]),
    "int64, none": (pa.int64(), []),
    "float64": (pa.float64(), [0.0, -0.0, 1e300, float("-inf")]),
    "bool": (pa.bool_(), [True, False, None, True, True, True, True, True, True]),
    "string": (pa.string(), ["", "a", None, "\u00e9\u8bad"]),
    "list<float>": (FLOATS, [[0.5, -1.5], [], None, [2.0]]),
    "list<uint8>": (list_of(pa.uint8()), [[1, 0, 1]]),
    "list<struct>": (SPANS, [[{"start": 0, "stop": 2, "version": 7}], None, []]),
    "all null": (FLOATS, [None, None]),
}
# A new value here means a new format version.
EXPECTED = {
    "int32": "0e350182b25ef4aa9cbdbbdff537b529b4a7122f020a0a846a64831044b2e8aa",
    "int64, none": "efadf8f7ac1d9ff3d905a1c06e464515c03745de2791c2a6d779cc7d121e43bf",
    "float64": "e76420bbe5dfffcffb41a04e55c6c132f386b9545700a632caa065993f2c3f93",
    "bool": "3ea01d49fc52c99090dc7d25f64bdb6d85eab49e6626f5a58661f4d7970a6ba8",
    "string": "cbf458d1d70ffd3238d757cdf0ac08f9e7e927b67461944c2896eba057c7691f",
    "list<float>": "9bcc37dcab494654d2a9cf9f4133747a31055513ababb0b36fba8cbb15f3a410",
    "list<uint8>": "d530014b04d2bbb8adfc9665b4e5ed6a8069afb83a9a0e81245a79234cdcad63",
    "list<struct>": "9e8d36155044e9d971d2d26643fd06fb148205393b2f0035e1a5b14af29aad03",
    "all null": "e0cc4a165a26c882af272fd39d552465d24fac3b03accca9405e40a7bbca6d7a",
}


@pytest.mark.parametrize("name", VECTORS)
def test_golden_vectors_stay_as_they_are(name: str) -> None:
    kind, values = VECTORS[name]
    assert column_digest(pa.array(values, kind)) == EXPECTED[name]


@pytest.mark.parametrize("name", VECTORS)
def test_the_digest_is_the_one_that_the_format_describes(name: str) -> None:
    kind, values = VECTORS[name]
    assert column_digest(pa.array(values, kind)) == reference(kind, values)


_LISTS = st.lists(st.none() | st.lists(st.floats(width=32), max_size=5), max_size=8)


@given(_LISTS)
def test_it_is_the_reference_for_every_list_column(values: list[Any]) -> None:
    assert column_digest(pa.array(values, FLOATS)) == reference(FLOATS, values)


@given(_LISTS, st.lists(st.integers(0, 8), max_size=3))
def test_chunks_and_slices_do_not_count(values: list[Any], cuts: list[int]) -> None:
    whole = pa.array([[9.0], *values, None], FLOATS)[1:-1]
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    chunks = [whole[start:stop] for start, stop in pairwise(edges)]
    assert column_digest(pa.chunked_array(chunks, FLOATS)) == reference(FLOATS, values)


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array.cast(pa.large_list(pa.field("other", pa.float32()))),
        lambda array: array.cast(pa.list_(pa.field("item", pa.float32()))),
        lambda array: pa.chunked_array([array]),
    ],
)
def test_width_and_names_of_a_list_do_not_count(change: Callable[[pa.Array], Any]) -> None:
    array = pa.array([[1.0, 2.0], None, []], FLOATS)
    assert column_digest(change(array)) == column_digest(array)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view()])
def test_the_form_of_a_string_does_not_count(kind: pa.DataType) -> None:
    values = ["a", None, "", "a longer text than fits a view"]
    plain = column_digest(pa.array(values, pa.string()))
    assert column_digest(pa.array(values, kind)) == plain
    assert column_digest(pa.array(values, pa.string()).dictionary_encode()) == plain


def test_hidden_values_under_nulls_do_not_count() -> None:
    offsets = pa.array([0, 2, 4], pa.int32())
    lists = [
        pa.ListArray.from_arrays(
            offsets, pa.array([1.0, 2.0, hidden, 4.0], pa.float32()), mask=pa.array([False, True])
        )
        for hidden in (3.0, 5.0)
    ]
    assert len({column_digest(one) for one in lists}) == 1
    valid = pa.py_buffer(b"\x01")
    hidden = [
        pa.Array.from_buffers(pa.int32(), 2, [valid, pa.py_buffer(struct.pack("<2i", 1, one))])
        for one in (7, 8)
    ]
    assert len({column_digest(one) for one in hidden}) == 1


def test_null_and_empty_differ() -> None:
    lists: list[list[Any]] = [[None], [[]], [[], []], []]
    assert len({column_digest(pa.array(one, FLOATS)) for one in lists}) == 4
    texts: list[list[Any]] = [[None], [""]]
    assert len({column_digest(pa.array(one, pa.string())) for one in texts}) == 2


def test_where_a_list_ends_counts() -> None:
    arrays = [pa.array(values, FLOATS) for values in ([[1.0], [2.0, 3.0]], [[1.0, 2.0], [3.0]])]
    assert len({column_digest(one) for one in arrays}) == 2


def test_the_type_counts() -> None:
    arrays = [pa.array([1, 2], kind) for kind in (pa.int32(), pa.int64(), pa.float32())]
    assert len({column_digest(one) for one in arrays}) == 3


@given(patterns(np.float32, 8).filter(len), st.data())
def test_every_bit_of_every_value_counts(values: Any, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 32 * len(values) - 1))
    changed = np.array(values).view(np.uint32)
    changed[bit // 32] ^= np.uint32(1 << bit % 32)
    before = column_digest(pa.array(values, pa.float32()))
    assert column_digest(pa.array(changed.view(np.float32), pa.float32())) != before


def test_an_absent_column_has_the_digest_of_nulls() -> None:
    assert null_digest(FLOATS, 3) == column_digest(pa.array([None] * 3, FLOATS))


@pytest.mark.parametrize("kind", [pa.null(), pa.decimal128(5), pa.map_(pa.string(), pa.int8())])
def test_other_types_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="a lake cannot store"):
        column_digest(pa.array([], kind))


def test_every_declared_type_has_a_digest() -> None:
    columns = [column for table in TABLES.values() for column in table.columns]
    assert all(len(null_digest(column.type, 2)) == 64 for column in columns)

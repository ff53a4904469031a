"""Tensors of every make become the same column, and none loses a bit."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies import patterns
from trajreplay.schema.dtypes import restore
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.tables import STEPS
from trajreplay.writer.encode import encode_column

FLOATS, TOKENS, MASK = STEPS["log_probs"], STEPS["tokens"], STEPS["loss_mask"]
ROWS = [[0.5, -1.5], [], [2.0]]
LENGTHS = np.array([2, 0, 1])
FLAT = [one for row in ROWS for one in row]
ARROW = pa.list_(pa.float32())


@pytest.mark.parametrize(
    "values",
    [
        ROWS,
        tuple(ROWS),
        FLAT,
        [torch.tensor(row) for row in ROWS],
        [torch.tensor(row, requires_grad=True) for row in ROWS],
        torch.tensor(FLAT),
        torch.tensor([0.0, *FLAT])[1:],
        torch.tensor([[one, 9.0] for one in FLAT])[:, 0],
        torch.tensor(FLAT, dtype=torch.float64),
        torch.tensor(FLAT, dtype=torch.float16),
        torch.tensor(FLAT, dtype=torch.bfloat16),
        [np.array(row, np.float32) for row in ROWS],
        [np.array(row, np.float16) for row in ROWS],
        np.array(FLAT, np.float32),
        np.array(FLAT, ">f4"),
        np.array([[one, 9.0] for one in FLAT], np.float32)[:, 0],
        pa.array(ROWS, ARROW),
        pa.array([[7.0], *ROWS], ARROW)[1:],
        pa.array(ROWS, pa.large_list(pa.float32())),
        pa.chunked_array([ROWS[:1], ROWS[1:]], ARROW),
        pa.array(FLAT, pa.float32()),
        [pa.array(row, pa.float32()) for row in ROWS],
        [np.array(ROWS[0], np.float32), np.array([]), np.array(ROWS[2], np.float32)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_make_gives_the_same_column(values: Any) -> None:
    column = encode_column(FLOATS, values, LENGTHS)
    assert column.rows(0, 3).equals(pa.array(ROWS, FLOATS.type))
    assert column.values.dtype == np.float32


def test_a_square_tensor_is_one_row_a_sample() -> None:
    for values in (torch.ones(2, 3), np.ones((2, 3), np.float32), pa.array([[1.0] * 3] * 2)):
        assert encode_column(FLOATS, values).lengths.tolist() == [3, 3]
    fixed = pa.array([[1.0] * 3] * 2, pa.list_(pa.float32(), 3))
    assert encode_column(FLOATS, fixed).lengths.tolist() == [3, 3]


@pytest.mark.parametrize(
    "values",
    [
        [None, [1.0], None],
        [None, torch.ones(1), None],
        pa.array([None, [1.0], None], ARROW),
        pa.chunked_array([pa.array([None, [1.0]], ARROW), pa.array([None], ARROW)]),
    ],
)
def test_a_sample_without_values_is_null(values: Any) -> None:
    column = encode_column(FLOATS, values)
    assert column.rows(0, 3).to_pylist() == [None, [1.0], None]
    assert column.rows(1, 3).to_pylist() == [[1.0], None]
    assert not column.all_null
    assert encode_column(FLOATS, [None, None]).all_null


@given(patterns(np.uint16))
def test_every_bfloat16_comes_back_bit_for_bit(bits: Any) -> None:
    tensor = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    for values in (tensor, [tensor]):
        column = encode_column(FLOATS, values, np.array([len(bits)]))
        assert column.source_dtype == "bfloat16"
        np.testing.assert_array_equal(restore(column.values, "bfloat16"), bits)


@given(patterns(np.uint16))
def test_every_float16_comes_back_bit_for_bit(bits: Any) -> None:
    half = bits.view(np.float16)
    for values in (half, [half], torch.from_numpy(half.copy()), pa.array(half, pa.float16())):
        column = encode_column(FLOATS, values, np.array([len(bits)]))
        assert column.source_dtype == "float16"
        back = restore(column.values, "float16")
        np.testing.assert_array_equal(back.view(np.uint16), bits)


@given(patterns(np.float32))
def test_every_float32_is_kept_bit_for_bit(values: Any) -> None:
    sized = np.array([len(values)])
    for one in (values, [values], torch.from_numpy(values.copy()), pa.array(values, pa.float32())):
        column = encode_column(FLOATS, one, sized)
        np.testing.assert_array_equal(column.values.view(np.uint32), values.view(np.uint32))


@given(st.lists(st.floats(width=32)))
def test_float64_that_float32_holds_is_taken_and_remembered(values: list[float]) -> None:
    column = encode_column(FLOATS, np.array(values, np.float64), np.array([len(values)]))
    assert column.source_dtype == "float64"
    np.testing.assert_array_equal(restore(column.values, "float64"), np.array(values))


@pytest.mark.parametrize("number", [0.1, 1e300, 5e-324, 16777217.0])
def test_float64_that_float32_cannot_hold_is_refused_with_what_to_do(number: float) -> None:
    with pytest.raises(CaptureError, match=r"log_probs has 1 values that float32 .*\n\nCast them"):
        encode_column(FLOATS, torch.tensor([1.0, number], dtype=torch.float64), np.array([2]))


def test_python_numbers_take_the_type_of_the_column() -> None:
    column = encode_column(FLOATS, [[0.1, 1]])
    assert column.values.tolist() == [np.float32(0.1), 1.0]
    assert column.source_dtype == "float32"
    assert encode_column(TOKENS, [[1, 70_000]]).source_dtype == "int32"


def test_a_python_number_beyond_the_column_is_refused() -> None:
    with pytest.raises(CaptureError, match="the first of row 1 is 1e\\+300 of python"):
        encode_column(FLOATS, [[1.0], [1e300]])
    assert np.isinf(encode_column(FLOATS, [[float("inf")]]).values[0])


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**40])
def test_a_token_id_beyond_int32_is_refused(number: int) -> None:
    with pytest.raises(CaptureError, match="tokens has 1 values that int32 cannot hold exactly"):
        encode_column(TOKENS, [torch.tensor([1]), torch.tensor([number])])


@pytest.mark.parametrize(
    "values", [[[1, 0]], [[True, False]], [torch.tensor([1.0, 0.0])], [np.array([True, False])]]
)
def test_a_mask_may_be_of_any_kind_of_number(values: Any) -> None:
    assert encode_column(MASK, values).values.tolist() == [1, 0]


@pytest.mark.parametrize("values", [[[0.5]], [[-1]], [[256]], [torch.tensor([float("nan")])]])
def test_a_mask_that_is_no_small_number_is_refused(values: Any) -> None:
    with pytest.raises(CaptureError, match="loss_mask has 1 values that uint8 cannot hold"):
        encode_column(MASK, values)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ("text", "is a str, expected a tensor, array or list"),
        (3.0, "is a float"),
        ({1: 2}, "is a dict"),
        ([["a"]], "a list of <U1 for a sample, expected numbers"),
        ([[[1.0]]], "expected numbers"),
        ([torch.zeros(1, 2)], "a sample with 2 dimensions, expected 1"),
        ([torch.tensor(1.0)], "a sample with 0 dimensions, expected 1"),
        (torch.zeros(1, 2, 3), "has 3 dimensions, expected 1 \\(packed\\) or 2"),
        ([np.zeros((1, 2))], "a sample with 2 dimensions"),
        ([torch.zeros(1), torch.zeros(1, dtype=torch.float64)], "several dtypes: float32, float64"),
        ([np.zeros(1), np.zeros(1, np.float32)], "several dtypes"),
        ([1.0, None], "None among the values of a packed list"),
        ([[1.0], 3.0], "has a float for a sample"),
        (pa.array([[1.0, None]]), "has null elements"),
        (pa.array([1.0, None]), "has null elements"),
        (pa.array([["a"]]), "has the Arrow type list"),
        (torch.zeros(2, dtype=torch.complex64), "has the dtype complex64, expected numbers"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "dtype float8_e4m3fn, which a lake cannot store"),
    ],
)
def test_values_of_no_known_form_are_refused(values: Any, problem: str) -> None:
    with pytest.raises(CaptureError, match=problem):
        encode_column(FLOATS, values, np.array([2]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_tensor_on_a_device_is_brought_to_the_host() -> None:
    rows = [torch.tensor(row, dtype=torch.bfloat16, device="cuda") for row in ROWS]
    for values in (rows, torch.cat(rows)):
        column = encode_column(FLOATS, values, LENGTHS)
        assert column.source_dtype == "bfloat16"
        assert column.rows(0, 3).to_pylist() == ROWS


# K-092
def test_offsets_beyond_32_bits_do_not_overflow() -> None:
    row = 2**30 + 4
    huge = np.broadcast_to(np.uint8(1), 2 * row + 3)  # one byte of memory
    column = encode_column(MASK, [[1]])
    column = type(column)(MASK, huge, np.array([row, row, 3]), None, "uint8")
    assert column.offsets[-1] == 2 * row + 3 > 2**31
    assert column.rows(2, 3).to_pylist() == [[1, 1, 1]]


def test_values_in_bytes_are_not_copied_and_others_are() -> None:
    content = np.arange(3, dtype="<f4").tobytes()
    lengths = np.array([1, 2])
    lasting = np.frombuffer(memoryview(content), "<f4")
    assert np.shares_memory(encode_column(FLOATS, lasting, lengths).values, lasting)
    changing = np.frombuffer(bytearray(content), "<f4")
    locked = np.arange(3, dtype="<f4")[:]
    locked.flags.writeable = False
    odd = np.frombuffer(b"." + content, "<f4", offset=1)
    for values in (changing, locked, changing[:], odd):
        found = encode_column(FLOATS, values, lengths).values
        assert not np.shares_memory(found, values)
        assert found.tolist() == values.tolist()

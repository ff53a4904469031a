"""Copies: every form that values come in, and nothing that happens to them later."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajreplay import CaptureError
from trajreplay.capture.taking.blocks import Block
from trajreplay.capture.taking.copies import Copier
from trajreplay.capture.taking.slots import Slots


def copied(values: Any) -> Any:
    """The same values in the same form and graph."""
    if isinstance(values, (list, tuple)):
        return type(values)(map(copied, values))
    if isinstance(values, (int, float, bool)):
        return values
    return values.copy() if isinstance(values, np.ndarray) else values.clone()


def spoil(values: Any) -> None:
    """Do to values what an optimizer may do to them in place."""
    if isinstance(values, (list, tuple)):
        for one in values:
            spoil(one)
        if isinstance(values, list):
            values.clear()
    elif isinstance(values, np.ndarray):
        if values.dtype == object:
            spoil(values.tolist())
        values[...] = 9.0
    elif isinstance(values, torch.Tensor):
        values.detach().fill_(9.0)


LENGTHS = st.lists(st.integers(0, 70), max_size=5)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64])


def bits(held: Block | list[Any]) -> list[bytes]:
    """Each row as its bytes."""
    rows = held.rows() if isinstance(held, Block) else held
    tensors = [torch.as_tensor(one).contiguous() for one in rows]
    return [one.view(torch.uint8).numpy().tobytes() if one.numel() else b"" for one in tensors]


def forms(rows: list[torch.Tensor]) -> dict[str, Any]:
    """The same values in each form that a trainer may hold them in."""
    width = max(map(len, rows), default=0) + 2
    padded = torch.zeros(len(rows), width, dtype=rows[0].dtype) if rows else torch.zeros(0, 2)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return {
        "list": [one.clone() for one in rows],
        "tuple": tuple(one.clone() for one in rows),
        "packed": torch.cat(rows) if rows else torch.zeros(0),
        "padded": padded,
        "strided": padded.repeat_interleave(2, 1)[:, ::2],
        "tensors of one number": [[one.clone() for one in row] for row in rows],
        "in tuples": [tuple(one.reshape(1).clone() for one in row) for row in rows],
    }


def of_numbers(rows: list[torch.Tensor]) -> dict[str, Any]:
    """The same values as numbers of each sample, whose dtype nobody knows."""
    listed = [row.tolist() for row in rows]
    mixed = [[torch.tensor(one) if at % 2 else one for at, one in enumerate(row)] for row in listed]
    objects = []
    for row in mixed:
        held = np.empty(len(row), object)
        held[:] = row[::-1]
        objects.append(held[::-1])
    return {
        "numbers": listed,
        "numbers and tensors": [row[1:2] + row[:1] + row[2:] for row in mixed],
        "arrays of numbers": [[np.array(one) for one in row] for row in listed],
        "arrays of objects": objects,
    }


@given(lengths=LENGTHS, dtype=DTYPES, seed=st.integers(0, 9))
def test_rows_are_the_same_bits_whatever_form_they_come_in(
    lengths: list[int], dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    rows = [(100 * torch.randn(length)).to(dtype) for length in lengths]
    copier = Copier(Slots(1 << 20))
    for values in forms(rows).values():
        assert bits(copier.block("log_probs", values, lengths)) == bits(rows)


@given(lengths=LENGTHS.filter(any), data=st.data())
def test_what_a_trainer_does_to_its_tensor_later_is_not_seen(
    lengths: list[int], data: st.DataObject
) -> None:
    rows = [torch.randn(length) for length in lengths]
    values = data.draw(st.sampled_from(sorted(forms(rows).items())))[1]
    held = Copier(Slots(1 << 20)).block("log_probs", values, lengths)
    spoil(values)
    assert bits(held) == bits(rows)


@given(lengths=LENGTHS.filter(any), data=st.data())
def test_numbers_in_a_sequence_are_those_at_the_hand_off_or_refused(
    lengths: list[int], data: st.DataObject
) -> None:
    rows = [torch.randn(length) for length in lengths]
    name, values = data.draw(st.sampled_from(sorted(of_numbers(rows).items())))
    held = Copier(Slots(1 << 20)).block("log_probs", values, lengths)
    spoil(values)
    if name in ("numbers", "arrays of numbers"):
        assert held.rows() == [row.tolist() for row in rows]
        return
    with contextlib.suppress(CaptureError):
        assert [sorted(one) for one in held.rows()] == [sorted(row.tolist()) for row in rows]


@pytest.mark.parametrize(
    "value", ["text", ["text"], [1.0, "text"], [[1.0]], [object()], {1.0}, np.array(["t"])]
)
def test_what_is_no_number_is_refused(value: Any) -> None:
    def rows() -> None:
        Copier(Slots(0)).block("log_probs", [value], [1]).rows()

    with pytest.raises(CaptureError, match=r"expected numbers|for one number"):
        rows()


WHOLE = ["padded", "strided", "in a graph"]
FORMS_TOGETHER = st.sampled_from([WHOLE, ["list", "tuple"], ["packed"], [*WHOLE, "list", "array"]])


def kinds_of(forms: list[str]) -> st.SearchStrategy[list[tuple[str, torch.dtype]]]:
    """Columns in these forms, each of a dtype."""
    dtypes = st.sampled_from([torch.float32, torch.bfloat16])
    return st.lists(st.tuples(st.sampled_from(forms), dtypes), max_size=7)


@given(
    lengths=LENGTHS,
    kinds=FORMS_TOGETHER.flatmap(kinds_of),
    none=st.booleans(),
    seed=st.integers(0, 9),
)
def test_columns_that_are_copied_together_are_each_as_it_was_at_the_hand_off(
    lengths: list[int], kinds: list[tuple[str, torch.dtype]], none: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    slots, columns, expected = Slots(1 << 20), {}, {}
    for number, (kind, dtype) in enumerate(kinds):
        rows = [(100 * torch.randn(length)).to(dtype) for length in lengths]
        made = forms([one.float() for one in rows] if kind == "array" else rows)
        values = made.get(kind, made["padded"])
        if kind == "array":
            values = values.numpy()
        elif kind == "in a graph":
            values = values.requires_grad_() * 1
        columns[str(number)], expected[str(number)] = (
            values,
            bits([one.float() for one in rows] if kind == "array" else rows),
        )
    for _ in range(2):  # the second time in memory that was used before
        copier = Copier(slots)
        kept = {name: copied(one) for name, one in columns.items()}
        if none:
            kept["none"] = None
        found = copier.columns(kept, lengths).blocks()
        for one in kept.values():
            spoil(one)
        assert "none" not in found
        assert {name: bits(block) for name, block in found.items()} == expected
        copier.release()


@given(length=st.integers(1, 50))
def test_a_tensor_in_a_graph_is_copied_without_it(length: int) -> None:
    leaf = torch.randn(2, length, requires_grad=True)
    for values in (leaf * 2, list(leaf * 2)):
        held = Copier(Slots(1 << 20)).block("log_probs", values, [length] * 2)
        assert not any(one.requires_grad for one in held.rows())


def test_other_makes_than_tensors_are_copied_too() -> None:
    array, packed, listed = np.arange(6.0).reshape(2, 3), np.arange(3.0), [[1.0, 2.0], None]
    copier = Copier(Slots(1 << 20))
    padded = copier.block("kl", array, [3, 1]).rows()
    split = copier.block("kl", packed, [1, 2]).rows()
    lists = copier.block("kl", listed, [2, 1]).rows()
    array[:], packed[:] = -1.0, -1.0
    listed[0].append(3.0)  # type: ignore[union-attr]
    assert [one.tolist() for one in (*padded, *split)] == [[0, 1, 2], [3], [0], [1, 2]]
    assert lists == [[1.0, 2.0], None]


@pytest.mark.parametrize(
    "values",
    [torch.zeros(3), torch.zeros(3, 2), torch.zeros(2, 1), torch.zeros(2, 2, 2), [[1.0]], "text"],
    ids=["packed", "rows", "narrow", "three dimensions", "list", "text"],
)
def test_values_that_do_not_fit_the_samples_are_refused(values: Any) -> None:
    with pytest.raises(CaptureError, match="log_probs has"):
        Copier(Slots(0)).block("log_probs", values, [2, 2])


@given(shape=st.lists(st.integers(0, 4), max_size=4))
def test_a_value_of_any_shape_is_copied(shape: list[int]) -> None:
    value = torch.randn(shape)
    held = Copier(Slots(1 << 20)).value(value)
    assert held.equal(value)
    assert not value.numel() or held.data_ptr() != value.data_ptr()


def test_memory_is_used_again_and_bounded() -> None:
    slots = Slots(1 << 16)
    first = Copier(slots)
    (row,) = first.block("kl", torch.ones(1, 2000), [2000]).rows()
    first.release()
    (again,) = Copier(slots).block("kl", torch.zeros(1, 1500), [1500]).rows()
    assert again.data_ptr() == row.data_ptr()
    wide = Copier(slots)
    (big,) = wide.block("kl", torch.ones(1, 1 << 15), [1 << 15]).rows()
    wide.release()  # 128 KiB do not stay
    assert slots.take(torch.float32, (1 << 15,)).held.data_ptr() != big.data_ptr()

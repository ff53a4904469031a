"""Ids and coordinates: what is taken, and what is refused with the reason."""

import unicodedata

import pytest
from hypothesis import given

from tests.helpers.strategies import ids
from trajreplay.schema.errors import SchemaError
from trajreplay.schema.identity import (
    CaptureKey,
    Kind,
    ParallelCoordinates,
    check_count,
    check_id,
    make_key,
)


@given(ids())
def test_an_id_of_any_script_is_taken_as_it_is(value: str) -> None:
    assert check_id("run_id", value) == value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "no name that a folder can have"),
        (".", "no name that a folder can have"),
        ("..", "no name that a folder can have"),
        ("a\nb", "control characters"),
        ("a\x00", "control characters"),
        ("\x7f", "control characters"),
        ("\x85", "control characters"),
        ("\ud800", "control characters"),
        (unicodedata.normalize("NFD", "\u00e9"), "normal form C"),
        ("x" * 129, "129 bytes"),
        ("\u8bad" * 30, "270 bytes"),
        (7, "expected a string"),
        (None, "expected a string"),
        (b"r", "expected a string"),
    ],
)
def test_an_id_that_a_file_system_may_spoil_is_refused(value: object, problem: str) -> None:
    with pytest.raises(SchemaError, match=problem):
        check_id("run_id", value)


@pytest.mark.parametrize("value", [-1, 2**31, True, 1.0, "1", None])
def test_a_coordinate_is_a_small_whole_number(value: object) -> None:
    with pytest.raises(SchemaError, match="rank is"):
        check_count("rank", value)


@pytest.mark.parametrize(
    ("kind", "rollout_id", "step_id"),
    [("rollout", 1, 2), ("step", 1, None), ("step", None, 1), ("rollout", None, None)],
)
def test_a_kind_has_its_own_coordinates(
    kind: Kind, rollout_id: int | None, step_id: int | None
) -> None:
    with pytest.raises(SchemaError):
        make_key("r", 0, kind, rollout_id, step_id, 0)


def test_a_key_reads_well_in_messages() -> None:
    key = make_key("r", 2, "step", 3, 1, 0)
    assert str(key) == "run 'r' attempt 2 rollout 3 step 1 rank 0"
    assert isinstance(key, CaptureKey)


def test_a_parallel_rank_lies_within_its_dimension() -> None:
    with pytest.raises(SchemaError, match=r"tensor_rank is 2, expected 0 to tensor_size - 1 = 1"):
        ParallelCoordinates(tensor_rank=2, tensor_size=2)

"""Records of attempts: they come back, and nothing damaged or renamed does."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.strategies import ids
from trajreplay.schema.attempt import AttemptRecord, dump_attempt, load_attempt
from trajreplay.schema.canonical import dump_signed, load_signed
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ResumePoint
from trajreplay.schema.layout import attempt_path

RECORD = AttemptRecord("r", 1, 5, ResumePoint(0, 7), "slurm", "12")
PATH = attempt_path("r", 1)


@given(ids(), st.integers(0, 9), st.none() | st.builds(ResumePoint, st.integers(0, 9), st.just(3)))
def test_a_record_comes_back(run_id: str, attempt: int, point: ResumePoint | None) -> None:
    record = AttemptRecord(run_id, attempt, 5, point)
    assert load_attempt(dump_attempt(record), attempt_path(run_id, attempt)) == record


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempt", True),
        ("started_us", "5"),
        ("resumed_from", [0]),
        ("resumed_from", {"attempt": 0}),
        ("resumed_from", [0, -1]),
        ("run_id", 7),
        ("job_id", None),
        ("restarts", ["SLURM_RESTART_COUNT"]),
        ("restarts", {"SLURM_RESTART_COUNT": "2"}),
    ],
)
def test_a_field_of_another_type_is_refused(name: str, value: Any) -> None:
    tree = load_signed(dump_attempt(RECORD), PATH) | {name: value}
    with pytest.raises(DatasetError, match="no attempt record"):
        load_attempt(dump_signed(tree), PATH)


def test_a_record_of_before_restarts_were_noted_has_none() -> None:
    tree = load_signed(dump_attempt(RECORD), PATH)
    del tree["restarts"]
    assert load_attempt(dump_signed(tree), PATH) == RECORD


def test_a_renamed_record_is_refused() -> None:
    with pytest.raises(DatasetError, match="holds attempt 1 of run 'r', expected attempt 2"):
        load_attempt(dump_attempt(RECORD), attempt_path("r", 2))


def test_a_changed_record_is_refused() -> None:
    with pytest.raises(DatasetError, match="do not have the digest"):
        load_attempt(dump_attempt(RECORD).replace(b"slurm", b"Slurm"), PATH)

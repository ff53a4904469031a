"""What a trainer says of a capture: wrong at start it is refused, wrong in a step it is noted."""

import tempfile
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.capture.test_heartbeat import details
from tests.helpers.recorded import captured, enabled, reasons, switched
from tests.helpers.scenes import WAY
from trajreplay import CaptureError, Lake, ProducerInfo, SampleRecord, SchemaError, capture
from trajreplay.capture import CaptureWarning, Recorder
from trajreplay.capture.declared import whole
from trajreplay.schema import StageContract

NUMBERS = st.sampled_from([int, np.int64, np.int32, torch.tensor, np.array])
ODD_NUMBERS = st.sampled_from([-1, 1.0, "0", None, True, 2**63, torch.tensor(1.5), [0], object()])
RIGHT: list[dict[str, Any]] = [
    {},
    {"settings": WAY.short},
    {"settings": WAY.short.resolve()},
    {"stages": []},
    {"stages": [StageContract("sample")]},
    {"cohort_size": np.int64(1)},
]
WRONG: list[dict[str, Any]] = [
    {"settings": {"a": 1}},
    {"settings": 3},
    {"stages": ["nope"]},
    {"stages": [object()]},
    {"stages": 3},
    {"stages": ["sample", "sample"]},
    {"cohort_size": "x"},
    {"cohort_size": -1},
    {"cohort_size": 1.5},
    {"of_no_such_name": 1},
]


def lone_step(recorder: Recorder, at: tuple[Any, Any], index: Any = 0, **options: Any) -> None:
    with recorder.step(*at, **options):
        recorder.record_policy_loss(
            index, [SampleRecord("s", 2, 3, [1, 1])], {"loss": 1.0}, log_probs=-torch.ones(1, 2)
        )


@settings(max_examples=8)  # each makes a lake
@given(
    steps=st.lists(
        st.tuples(NUMBERS, NUMBERS, st.sampled_from([*RIGHT, *WRONG])), min_size=1, max_size=5
    )
)
def test_each_step_that_is_begun_has_an_entry_and_a_heartbeat(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)
        lake = Lake.create(f"{folder}/lake")
        recorder = enabled(lake, strict=False)
        for number, (as_id, as_index, options) in enumerate(steps):
            lone_step(recorder, (as_id(number), as_id(0)), as_index(0), **options)
        assert recorder.close()
        found = {one.key.rollout_id: one.status for one in captured(lake)}
        assert found == {
            number: "dropped" if options in WRONG else "complete"
            for number, (_, _, options) in enumerate(steps)
        }
        assert [one["rollout_id"] for one in details(lake)] == list(range(len(steps)))


@given(value=ODD_NUMBERS)
def test_what_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(CaptureError, match=r"step_id is .* expected a whole number"):
        whole("step_id", value)


@pytest.mark.filterwarnings("ignore::trajreplay.capture.CaptureWarning")
@settings(max_examples=8)  # each makes a lake
@given(value=ODD_NUMBERS, place=st.sampled_from([0, 1]))
def test_a_step_of_no_number_is_told_and_not_taken_for_the_one_before(
    value: Any, place: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(f"{folder}/lake")
        recorder = enabled(lake, strict=False)
        recorder.begin_step(0, 0)  # and never ended
        at: list[Any] = [1, 0]
        at[place] = value
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            lone_step(recorder, (at[0], at[1]))
        lone_step(recorder, (2, 0))
        recorder.close()
        assert ["expected a whole number" in str(one.message) for one in told] == [True]
        assert {one.key.rollout_id: (one.status, one.rows) for one in captured(lake)} == {
            0: ("dropped", 0),
            2: ("complete", 1),
        }


def test_a_micro_batch_whose_number_is_a_tensor_is_taken_once(lake: Lake) -> None:
    recorder = enabled(lake)
    with recorder.step(0, 0):
        for number in (torch.tensor(0), np.int64(0), 0):
            recorder.record_policy_loss(
                number,  # type: ignore[arg-type]
                [SampleRecord("s", 2, 3, [1, 1])],
                {"loss": 1.0},
                log_probs=-torch.ones(1, 2),
            )
    recorder.close()
    (entry,) = captured(lake)
    assert (entry.status, entry.rows, details(lake)[0]["loss"]) == ("complete", 1, 1.0)


def test_a_micro_batch_of_no_number_leaves_the_heartbeat_without_a_loss(lake: Lake) -> None:
    recorder = enabled(lake, strict=False)
    with recorder.step(0, 0):
        for number in (0, "one"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recorder.record_policy_loss(
                    number,  # type: ignore[arg-type]
                    [SampleRecord("s", 2, 3, [1, 1])],
                    {"loss": 1.0},
                )
    recorder.close()
    assert ("loss" in details(lake)[0], reasons(lake)[0][:18]) == (False, "record_policy_loss")


@pytest.mark.parametrize(
    "options",
    [
        {"settings": {"a": 1}},
        {"step_stages": ["nope"]},
        {"rollout_stages": ["sample", "sample"]},
        {"parallel": {"tensor_rank": 1}},
        {"producer": "me"},
        {"producer": ProducerInfo(framework="x" * 129)},
        {"producer": ProducerInfo(commit="a\nb")},
        {"producer": ProducerInfo(extra={"a": "text " * 100})},
        {"producer": ProducerInfo(extra={"text " * 100: "a"})},
        {"producer": ProducerInfo(extra={"a": 1})},  # type: ignore[dict-item]
        {"producer": ProducerInfo(extra={str(one): "" for one in range(33)})},
    ],
    ids=str,
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_no_capture_could_say_is_refused_at_start(
    lake: Lake, options: dict[str, Any], strict: bool
) -> None:
    with pytest.raises(SchemaError):
        capture.enable(switched(lake, strict=strict), **{"settings": WAY.short, **options})


def test_settings_that_nobody_gave_are_told_once_and_noted(lake: Lake) -> None:
    recorder = capture.enable(switched(lake, strict=False))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(2):
            lone_step(recorder, (number, 0))
        lone_step(recorder, (2, 0), settings=WAY.short)
        assert recorder.close()
    assert ["Give settings to enable" in str(one.message) for one in told] == [True]
    assert [one.status for one in captured(lake)] == ["dropped", "dropped", "complete"]
    assert len(details(lake)) == 3


def test_each_problem_is_told_once_however_many_there_are_of_it(lake: Lake) -> None:
    recorder = enabled(lake, strict=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(9):
            lone_step(recorder, (number, 0), **WRONG[2 + number % 3 * 3])
        recorder.flush()
        for number in range(9, 15):  # found by the thread that writes, of one type
            with recorder.step(number, 0):
                name = "a" * 200 if number % 2 else f"s-{number}"
                records = [SampleRecord(name, 2, 3, [1, 1])] * (1 if number % 2 else 2)
                recorder.record_policy_loss(0, records, {"loss": 1.0})
            recorder.flush()
    recorder.close()
    assert len(told) == 5, [str(one.message) for one in told]
    assert len(reasons(lake)) == 15

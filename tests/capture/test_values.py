"""Numbers and records are recorded as they were when they were handed over, whatever their make."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.recorded import captured, reasons, switched
from trajreplay import CaptureError, Lake, SampleRecord, Settings, capture
from trajreplay.capture.taking.values import _FIELDS, kept, taken
from trajreplay.schema import RewardSettings

WHOLE = Settings(reward=RewardSettings(weights={"style": 1.0, "tests": 2.0}))
NUMBERS = st.floats(-1e6, 1e6, width=32)
# How a trainer may hold numbers: each takes them, and gives one form for each with an edit of all.
FORMS: dict[str, Callable[[list[float]], tuple[list[Any], Callable[[], object]]]] = {}


def form(make: Callable[[list[float]], tuple[list[Any], Callable[[], object]]]) -> Any:
    FORMS[make.__name__] = make
    return make


@form
def plain(values: list[float]) -> tuple[list[Any], Callable[[], object]]:
    return list(values), lambda: None


@form
def torch_views(values: list[float]) -> tuple[list[Any], Callable[[], object]]:
    held = torch.tensor(values)
    return list(held), lambda: held.sub_(7.0)


@form
def torch_slices(values: list[float]) -> tuple[list[Any], Callable[[], object]]:
    held = torch.tensor(values, requires_grad=True)
    return [held[at : at + 1] for at in range(len(values))], lambda: held.detach().zero_()


@form
def numpy_views(values: list[float]) -> tuple[list[Any], Callable[[], object]]:
    held = np.array(values)
    return [held[at : at + 1].reshape(()) for at in range(len(values))], lambda: held.fill(9.0)


@form
def numpy_scalars(values: list[float]) -> tuple[list[Any], Callable[[], object]]:
    return [np.float32(one) for one in values], lambda: None


SCORES = ("raw_reward", "reward", "greedy_reward", "kept_baseline", "last_value")
MAKES = st.sampled_from(sorted(FORMS))


@settings(max_examples=12)  # each makes a lake
@given(data=st.data(), rows=st.integers(1, 3))
def test_no_edit_of_what_a_record_was_made_of_reaches_the_lake(
    data: st.DataObject, rows: int
) -> None:
    numbers = st.lists(NUMBERS, min_size=rows, max_size=rows)
    told: dict[str, list[float]] = {}
    given_now: dict[str, list[Any]] = {}
    edits: list[Callable[[], object]] = []
    for name in (*SCORES, "style", "tests"):
        told[name] = data.draw(numbers, name)
        given_now[name], edit = FORMS[data.draw(MAKES, name)](told[name])
        edits.append(edit)
    starts: list[Any] = [[0, 2, row] for row in range(rows)]
    spans: list[Any] = [[(0, 2, row)] for row in range(rows)]
    make = data.draw(st.sampled_from(["lists", "tuples", "numpy", "torch"]), "spans")
    if make != "tuples":
        wrap: Any = {"lists": list, "numpy": np.array, "torch": torch.tensor}[make]
        spans = [wrap([one]) for one in starts]
    components = [
        {name: given_now[name][row] for name in ("style", "tests")} for row in range(rows)
    ]
    records = [
        SampleRecord(
            f"s-{row}", 2, 3, [1, 1], group_index=0,
            reward_components=components[row],
            weight_versions=spans[row],
            **{name: given_now[name][row] for name in SCORES},
        )
        for row in range(rows)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(f"{folder}/lake")
        recorder = capture.enable(switched(lake), settings=WHOLE, rollout_stages=["sample"])
        recorder.begin_rollout(0)
        recorder.record(records)
        for edit in edits:
            edit()
        for row, one in enumerate(spans):
            components[row]["style"] = 5.0
            if isinstance(one, list):
                one.append((9, 9, 9))
            elif not isinstance(one, tuple):
                one[:] = 0
        recorder.end_rollout()
        recorder.close()
        names = ", ".join((*SCORES, "reward_components", "weight_versions"))
        found = Lake.open(lake.path).sql(f"select {names} from rollouts order by row").arrow()
    for name in SCORES:
        assert found[name].to_pylist() == told[name]
    assert found["reward_components"].to_pylist() == [
        [told["style"][row], told["tests"][row]] for row in range(rows)
    ]
    versions = [
        [tuple(span.values()) for span in row] for row in found["weight_versions"].to_pylist()
    ]
    assert versions == [[(0, 2, row)] for row in range(rows)]


@pytest.mark.parametrize("name", _FIELDS)
@pytest.mark.parametrize("at", [0, 2])
def test_each_field_that_can_change_is_looked_at_in_each_record(name: str, at: int) -> None:
    held = np.ones(1)
    changed: Any = {name: held}
    records = [SampleRecord(f"s-{row}", 1, 1, [1]) for row in range(3)]
    assert taken(records).records == records
    records[at] = replace(records[at], **changed)
    held_records = taken(records).records
    held[0] = 7.0
    assert [getattr(one, name) for one in held_records] == [
        1.0 if row == at else None for row in range(3)
    ]


def test_scalars_of_each_sample_are_those_at_the_time(lake: Lake) -> None:
    recorder = capture.enable(switched(lake), settings=WHOLE)
    losses, weights = [1.0, 2.0], {"loss": 4.0}
    with recorder.step(0, 0):
        recorder.record_policy_loss(0, [SampleRecord(f"s-{at}", 1, 1, [1]) for at in range(2)])
        recorder.record_scalars(
            "loss.policy", {"loss": losses}, scope="sample", reduction="mean", denominator=weights
        )
        losses.append(3.0)
        weights["loss"] = 5.0
    recorder.close()
    found = lake.sql("select value, denominator from outputs where scope = 'sample' order by row")
    assert found.arrow()["value"].to_pylist() == [1.0, 2.0]
    assert found.arrow()["denominator"].to_pylist() == [4.0, 4.0]


@pytest.mark.parametrize(
    "value", [np.float32(2.0), np.float16(2.0), np.longdouble(2.0), np.int8(2), np.array([2.0]),
              torch.tensor(2.0), torch.tensor([2], dtype=torch.bfloat16), torch.tensor(2)],
)  # fmt: skip
def test_one_number_of_any_make_is_a_plain_one(value: Any) -> None:
    assert (kept(value), type(kept(value)) in (int, float)) == (2, True)


@pytest.mark.parametrize("value", [[1.0], np.zeros(2), torch.zeros(0), object(), {}, 1j])
def test_what_is_no_number_is_refused_and_not_quoted(value: Any) -> None:
    with pytest.raises(CaptureError, match=f"a {type(value).__name__} is given for one number"):
        kept(value)


@pytest.mark.filterwarnings("ignore::trajreplay.capture.CaptureWarning")
def test_text_in_a_wrong_place_is_never_quoted_in_the_lake(lake: Lake) -> None:
    secret: Any = "a prompt of a person"
    given_there: list[dict[str, Any]] = [
        {"raw_reward": secret},
        {"prompt": [{"role": "user", "content": secret}]},
        {"truncated": secret},
        {"weight_versions": [secret]},
        {"reward_components": {"style": secret}},
        {"turns": secret},
    ]
    recorder = capture.enable(switched(lake, strict=False), settings=WHOLE)
    for at, fields in enumerate(given_there):
        with recorder.rollout(at):
            recorder.record([SampleRecord("s", 1, 1, [1], **fields)])
    recorder.close()
    assert [one.status for one in captured(lake)] == ["dropped"] * len(given_there)
    assert not [one for one in reasons(lake) if "person" in one]

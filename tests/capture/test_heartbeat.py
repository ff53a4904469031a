"""Heartbeats: every step leaves one, captured or not, and a clean end leaves its note."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.captures import verify
from tests.helpers.cohorts import record
from tests.helpers.devices import Device
from tests.helpers.recorded import captured, enabled, micro_batch, reasons, record_step
from tests.helpers.scenes import REWARDS, WAY, drawn
from tests.helpers.trainer import Trainer
from trajreplay import Lake
from trajreplay.capture import Selection
from trajreplay.capture.taking.heartbeat import _AT_ONCE
from trajreplay.schema.events import load_detail
from trajreplay.schema.identity import make_key
from trajreplay.schema.lakefile import open_lake
from trajreplay.writer import Event, commit_events


def details(lake: Lake, event: str = "heartbeat") -> list[dict[str, Any]]:
    """The details of all events of a kind, in order of time."""
    text = f"select detail from events where event = '{event}' order by time, seq"
    return [load_detail(one) for one in lake.sql(text).arrow()["detail"].to_pylist()]


def test_every_step_leaves_a_heartbeat_captured_or_not(lake: Lake) -> None:
    recorder = enabled(lake, selection=Selection(steps="1:0", rollouts="99"))
    samples = drawn()
    for rollout_id in range(3):
        record_step(recorder, samples, rollout_id)
    recorder.close()
    assert [one.key.rollout_id for one in captured(lake)] == [1]
    loss = sum(Trainer(WAY).loss(samples[at : at + 2])["loss"] for at in range(0, 8, 2))
    for step, one in enumerate(details(lake)):
        assert (one["step"], one["rollout_id"], one["step_id"]) == (step + 1, step, 0)
        assert one["loss"] == pytest.approx(loss, rel=1e-12)
        assert one["reward_mean"] == pytest.approx(sum(REWARDS) / len(REWARDS))
    assert len(details(lake)) == 3
    assert details(lake, "terminal") == [{"status": "ok", "steps": 3}]
    verify(lake)
    assert lake.validate().ok


def test_a_trainer_says_more_of_a_step(lake: Lake) -> None:
    recorder = enabled(lake)
    recorder.begin_step(5, 2)
    micro_batch(recorder, 0, drawn(), scalars={"loss": torch.tensor(math.nan)})
    recorder.end_step(step=41, grad_norm=7.5, of_no_field=1.0)
    recorder.close()
    (one,) = details(lake)
    assert math.isnan(one["loss"])
    assert (one["step"], one["grad_norm"]) == (41, 7.5)
    assert "of_no_field" not in one
    assert details(lake, "terminal")[0]["steps"] == 41


def test_a_micro_batch_that_is_seen_again_counts_once(lake: Lake) -> None:
    recorder = enabled(lake)
    with recorder.step(0, 0):
        for index in (0, 0, 1, 1):
            micro_batch(recorder, index, drawn()[4 * index :][:4], scalars={"loss": 1.0 + index})
    recorder.close()
    assert details(lake)[0]["loss"] == 3.0


def test_heartbeats_are_written_many_at_once(lake: Lake) -> None:
    recorder = enabled(lake, selection=Selection(steps="0:0", rollouts="99"))
    for step_id in range(1, _AT_ONCE + 3):
        with recorder.step(0, step_id):
            pass
    recorder.close()
    found = lake.sql("select distinct rollout_id, step_id from events").arrow()
    assert found.num_rows == 3  # a full batch, the rest, and the end
    assert len(details(lake)) == _AT_ONCE + 2


def test_a_recorder_that_is_closed_twice_ended_once(lake: Lake) -> None:
    recorder = enabled(lake)
    assert recorder.close()
    assert recorder.close()
    assert len(details(lake, "terminal")) == 1


def test_a_recorder_that_is_closed_by_an_exception_notes_no_clean_end(lake: Lake) -> None:
    recorder = enabled(lake)

    def train() -> None:
        try:
            with recorder.step(0, 0):
                raise ZeroDivisionError("a prompt")
        finally:
            recorder.close()

    with pytest.raises(ZeroDivisionError):
        train()
    (end,) = details(lake, "terminal")
    assert (end["status"], end["reason"]) == ("failed", "ZeroDivisionError ends the training")


def test_a_recorder_that_is_closed_within_a_step_notes_no_clean_end(lake: Lake) -> None:
    recorder = enabled(lake)
    recorder.begin_step(0, 0)
    recorder.close()
    (end,) = details(lake, "terminal")
    assert (end["status"], end["reason"]) == ("failed", "a step was not ended")


def test_a_training_that_is_tried_again_in_a_handler_may_end_clean(lake: Lake) -> None:
    try:
        raise MemoryError
    except MemoryError:
        recorder = enabled(lake)
        with recorder.step(0, 0):
            pass
        recorder.close()
    assert details(lake, "terminal") == [{"status": "ok", "steps": 1}]


def test_the_end_of_a_training_stands_beside_the_events_of_a_trace(lake: Lake) -> None:
    recorder = enabled(lake)
    record_step(recorder, drawn())
    store, key = open_lake(lake.path), make_key("r", recorder.attempt, "events", None, None, 0)
    commit_events(store, key, [Event("trace")])  # as an import of a trace of this run does
    assert recorder.close()
    assert details(lake, "terminal") == [{"status": "ok", "steps": 1}]
    found = lake.sql("select event from events").arrow()["event"].to_pylist()
    assert sorted(found) == ["heartbeat", "terminal", "trace"]


@pytest.mark.parametrize("again", [1, 3])
def test_heartbeats_of_a_step_that_is_tried_again_are_all_there(lake: Lake, again: int) -> None:
    chosen = Selection(steps="9:9", rollouts="99")
    for attempt in (None, *[0] * again):  # recorders of one attempt, each with two batches
        recorder = enabled(lake, selection=chosen, attempt=attempt)
        for grad_norm in (1.0, 2.0):
            recorder.begin_step(0, 3)
            recorder.end_step(grad_norm=grad_norm)
            recorder._heartbeats.flush()  # type: ignore[attr-defined]
        assert recorder.close()
    told = details(lake)
    assert [(one["rollout_id"], one["step_id"]) for one in told] == [(0, 3)] * 2 * (1 + again)
    assert [one["grad_norm"] for one in told] == [1.0, 2.0] * (1 + again)
    assert len(details(lake, "terminal")) == 1 + again
    assert lake.validate().ok


def test_a_resumed_process_numbers_no_step_that_the_trainer_does_not(lake: Lake) -> None:
    enabled(lake).close()
    recorder = enabled(lake, resume_rollout_id=5)
    for step in ({}, {"step": 12}, {}):
        recorder.begin_step(5, len(step))
        recorder.end_step(**step)
    recorder.close()
    assert [one.get("step") for one in details(lake)] == [None, 12, 13]
    assert [one.get("steps") for one in details(lake, "terminal")] == [0, 13]


def test_a_resumed_process_that_is_told_no_number_ends_without_one(lake: Lake) -> None:
    enabled(lake).close()
    recorder = enabled(lake, resume_rollout_id=5)
    with recorder.step(5, 0):
        pass
    recorder.close()
    assert details(lake, "terminal") == [{"status": "ok", "steps": 0}, {"status": "ok"}]


ODD: list[Any] = [np.float32(0.5), np.array(0.5), torch.tensor([0.5]), np.longdouble(0.5)]
NONE: list[Any] = ["a text", [0.5, 0.5], np.zeros(3), object(), 10**400, b"1"]


@pytest.mark.parametrize("value", ODD)
def test_numbers_of_any_make_are_noted(lake: Lake, value: Any) -> None:
    recorder = enabled(lake)
    rewarded = [replace(one, raw_reward=value) for one in map(record, drawn())]
    with recorder.step(0, 0):
        recorder.record_policy_loss(0, rewarded, {"loss": value})
    recorder.begin_step(0, 1)
    recorder.end_step(step=np.int64(7), grad_norm=value, valid_tokens=np.int32(3))
    recorder.close()
    first, second = details(lake)
    assert (first["loss"], first["reward_mean"]) == (0.5, 0.5)
    assert (second["step"], second["grad_norm"], second["valid_tokens"]) == (7, 0.5, 3)


@pytest.mark.filterwarnings("ignore::trajreplay.capture.CaptureWarning")
@pytest.mark.parametrize("value", NONE)
def test_a_field_that_is_no_number_takes_no_other_with_it(lake: Lake, value: Any) -> None:
    recorder = enabled(lake, strict=False)
    recorder.begin_step(0, 0)
    rewarded = [replace(one, raw_reward=value) for one in map(record, drawn())]
    recorder.record_policy_loss(0, rewarded, {"loss": value})
    recorder.end_step(step=value, grad_norm=value, valid_tokens=3)
    recorder.begin_step(0, 1)
    recorder.record_policy_loss(0, [record(one) for one in drawn()], {"loss": math.inf})
    recorder.record_policy_loss(1, [], {"loss": -math.inf})
    recorder.end_step(grad_norm=0.25)
    recorder.close()
    first, second = details(lake)
    assert first == {"rollout_id": 0, "step_id": 0, "step": 1, "valid_tokens": 3}
    assert (second["step"], second["grad_norm"]) == (2, 0.25)
    assert math.isnan(second["loss"])


@pytest.mark.filterwarnings("error::trajreplay.capture.CaptureWarning")
def test_a_step_that_is_given_up_leaves_a_heartbeat_and_no_warning(lake: Lake) -> None:
    recorder = enabled(lake)
    for rollout_id in range(3):
        recorder.begin_rollout(rollout_id)
        recorder.begin_step(rollout_id, 0)
        if rollout_id == 1:
            recorder.drop("skipped")
        micro_batch(recorder, 0, drawn(rollout_id=rollout_id), scalars={"loss": 1.5})
        recorder.record([])
        recorder.end_step(grad_norm=rollout_id)
        recorder.end_rollout()
    recorder.close()
    told = [(one["step"], one["rollout_id"], one["loss"]) for one in details(lake)]
    assert told == [(1, 0, 1.5), (2, 1, 1.5), (3, 2, 1.5)]
    assert [one["grad_norm"] for one in details(lake)] == [0, 1, 2]
    assert details(lake, "terminal") == [{"status": "ok", "steps": 3}]
    assert reasons(lake) == ["skipped", "skipped"]


def test_a_step_that_another_replaces_leaves_a_heartbeat(lake: Lake) -> None:
    recorder = enabled(lake)
    recorder.begin_step(0, 0)
    micro_batch(recorder, 0, drawn(), scalars={"loss": 1.5})
    recorder.begin_step(0, 1)
    recorder.end_step()
    recorder.close()
    told = [(one["step"], one["step_id"], one.get("loss")) for one in details(lake)]
    assert told == [(1, 0, 1.5), (2, 1, None)]


def test_a_step_that_is_tried_again_leaves_one_heartbeat(lake: Lake) -> None:
    recorder = enabled(lake)
    with pytest.raises(MemoryError), recorder.step(0, 0):
        raise MemoryError
    with recorder.step(0, 1):
        pass
    recorder.close()
    assert [(one["step"], one["step_id"]) for one in details(lake)] == [(1, 1)]


def test_heartbeats_wait_for_no_device(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    recorder = enabled(lake)
    recorder.begin_step(0, 0)
    rewarded = [
        replace(one, raw_reward=device.number(2.0 * row), truncated=device.number(row % 2))
        for row, one in enumerate(map(record, drawn()))
    ]
    recorder.record_policy_loss(0, rewarded[:4], {"loss": device.number(0.25)})
    recorder.record_policy_loss(1, rewarded[4:], {"loss": 0.5})
    recorder.drop("only-heartbeats")
    recorder.end_step(step=device.number(9.0), grad_norm=device.number(3.0))
    device.catch_up()
    recorder.close()
    (one,) = details(lake)
    assert (one["loss"], one["grad_norm"], one["step"]) == (0.75, 3.0, 1)
    assert (one["reward_mean"], one["truncation_rate"]) == (7.0, 0.5)

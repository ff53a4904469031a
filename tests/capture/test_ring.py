"""The flight recorder: the last steps are held, and written when something goes wrong."""

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.captures import entries_of
from tests.helpers.devices import Device
from tests.helpers.processes import ROOT
from tests.helpers.recorded import (
    captured,
    enabled,
    micro_batch,
    reasons,
    record_rollout,
    record_step,
    switched,
)
from tests.helpers.scenes import WAY, drawn
from trajreplay import Lake, ProducerInfo, SampleRecord, SchemaError, capture
from trajreplay.capture import CaptureWarning, Recorder, Selection
from trajreplay.capture.switching.triggers import TOLD_WITHIN, Triggers, Watch
from trajreplay.capture.writing.background import Background
from trajreplay.capture.writing.handoff import Handoff

GONE = (
    "it was no longer held when a step that consumed from it was captured; of it 8 samples are lost"
)


def kept(lake: Lake) -> list[tuple[int | None, int | None]]:
    """What is in the lake as data: rollout and step."""
    found = [one for one in captured(lake) if one.status == "complete"]
    return sorted(
        [(one.key.rollout_id, one.key.step_id) for one in found],
        key=lambda one: (one[0], one[1] or -1),
    )


def fly(recorder: Recorder, rollouts: int, first: int = 0) -> None:
    """Record rollouts with a step each."""
    for rollout_id in range(first, first + rollouts):
        record_step(recorder, record_rollout(recorder, rollout_id), rollout_id)


def test_nothing_is_written_until_a_trigger_fires(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=2)
    fly(recorder, 6)
    recorder.flush()
    assert kept(lake) == []
    recorder.promote("a-call-of-a-test")
    recorder.close()
    # Rollouts that no held step consumed from are there as well: their step may be the next.
    assert [one for one in kept(lake) if one[1] is not None] == [(4, 0), (5, 0)]
    assert {4, 5} <= {one for one, step in kept(lake) if step is None}
    assert lake.replay(steps=[(4, 0), (5, 0)]).verdict == "pass"
    told = lake.inspect(5, 0).to_json()
    assert "a-call-of-a-test" in str(told)


def test_what_is_held_is_let_go_at_the_end(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=2)
    fly(recorder, 3)
    recorder.close()
    assert captured(lake) == []


def test_a_loss_that_is_no_number_writes_the_steps_before_it(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=3)
    fly(recorder, 4)
    with recorder.step(4, 0):
        micro_batch(recorder, 0, drawn(rollout_id=4)[:4], scalars={"loss": math.nan})
    recorder.flush()
    assert [one for one in kept(lake) if one[1] is not None] == [(2, 0), (3, 0), (4, 0)]
    # It goes on being none, and is not written over and over again.
    for rollout_id in (5, 6, 7):
        with recorder.step(rollout_id, 0):
            micro_batch(recorder, 0, drawn(rollout_id=rollout_id)[:4], scalars={"loss": math.nan})
    recorder.close()
    assert (5, 0) not in kept(lake)


@settings(max_examples=8)  # each makes a lake
@given(
    keep=st.integers(1, 3),
    incidents=st.lists(
        st.sampled_from([{}, {"loss": 6.0}, {"loss": math.nan}, {"kl_loss": 9.0}]),
        min_size=1,
        max_size=9,
    ),
)
def test_each_trigger_rests_by_itself(keep: int, incidents: list[dict[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(f"{folder}/lake")
        recorder = enabled(lake, keep_last=keep, triggers=Triggers("nonfinite,loss>5,kl_loss>8"))
        last: dict[str, int] = {}
        expected = set()
        for step, scalars in enumerate(incidents):
            with recorder.step(step, 0):
                told = {"loss": 1.0, **scalars}
                recorder.record_policy_loss(0, [SampleRecord("s", 2, 3, [1, 1])], told)
            kind = str(scalars)
            if scalars and step - last.get(kind, -99) > keep:
                last[kind] = step
                expected |= set(range(max(0, step - keep + 1), step + 1))
        recorder.close()
        assert {one for one, _ in kept(lake)} == expected


def test_what_is_chosen_is_written_all_the_same(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=2, selection=Selection(rollouts="1"))
    fly(recorder, 5)
    recorder.close()
    assert kept(lake) == [(1, None), (1, 0)]


@settings(max_examples=8)  # each makes a lake
@given(
    keep=st.integers(1, 5),
    lengths=st.lists(st.sampled_from([1, 100, 20_000, 100_000]), min_size=1, max_size=7),
)
def test_each_of_the_last_steps_is_written_or_noted_however_little_fits(
    keep: int, lengths: list[int]
) -> None:
    limit = 1 << 18
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lake = Lake.create(f"{folder}/lake")
        recorder = enabled(lake, strict=False, keep_last=keep, ring_bytes=limit)
        for step, length in enumerate(lengths):
            one = SampleRecord(f"s-{step}", length, length, ())
            mask, values = torch.ones(1, length, dtype=torch.uint8), -torch.ones(1, length)
            with recorder.rollout(step):
                recorder.record([one], loss_mask=mask, old_log_probs=values)
            with recorder.step(step, 0):
                loss = math.nan if step == len(lengths) - 1 else 0.0
                recorder.record_policy_loss(
                    0, [one], {"loss": loss}, values, columns={"loss_mask": mask}
                )
            assert recorder._outlet._ring._held_bytes() <= limit  # type: ignore[attr-defined]
        assert recorder.close()
        found = {(one.key.rollout_id, one.key.step_id): one for one in captured(lake)}
        last = range(max(0, len(lengths) - keep), len(lengths))
        assert [at for at, step in sorted(found, key=str) if step is not None] == list(last)
        assert {at for at, step in found if step is None} >= set(last)
        lost = [one for one in found.values() if one.status == "dropped"]
        assert all("ring full" in one.reason for one in lost)
        for step in last:  # the newest are there where they and their rollouts fit
            if sum(lengths[max(0, step - keep) :]) < 2_000:
                assert found[step, 0].status == "complete"
        too_long = 100_000 in lengths  # neither its rollout nor its step fits by itself
        assert ["is only noted: ring full" in str(one.message) for one in told] in (
            [[True]] if lost or too_long else [[], [True]]
        )


def test_a_rollout_is_held_until_its_consumer_is_known(lake: Lake) -> None:
    recorder = enabled(lake, selection=Selection(steps="3:0"))
    rollouts = [record_rollout(recorder, rollout_id) for rollout_id in range(4)]
    recorder.flush()
    assert kept(lake) == []
    record_step(recorder, rollouts[2][:4] + rollouts[1][4:], 3, 0)
    record_step(recorder, rollouts[3], 3, 1)
    recorder.close()
    assert kept(lake) == [(1, None), (2, None), (3, 0)]
    assert lake.replay().verdict == "pass"


def test_a_rollout_that_could_not_be_held_is_noted_as_dropped(lake: Lake) -> None:
    recorder = enabled(lake, selection=Selection(steps="30:0"))
    first = record_rollout(recorder, 0)
    for rollout_id in range(1, 12):
        record_rollout(recorder, rollout_id)
    record_step(recorder, first, 30, 0)
    recorder.close()
    assert kept(lake) == [(30, 0)]
    assert reasons(lake) == [GONE]


HALVES = [["s-0"], ["s-1"]]


@pytest.mark.parametrize("options", [{"keep_last": 2}, {"selection": Selection(steps="0:0")}])
@pytest.mark.parametrize("retried", [False, True])
def test_a_rollout_that_is_recorded_twice_is_noted_as_neither(
    lake: Lake, options: dict[str, Any], retried: bool
) -> None:
    recorder = enabled(lake, strict=False, **options)
    records = {
        one: SampleRecord(one, 2, 3, [1, 1], raw_reward=1.0) for half in HALVES for one in half
    }
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number, half in enumerate(HALVES):
            recorder.begin_rollout(0)
            recorder.record([records[one] for one in half])
            if retried and not number:
                recorder.drop("again")
            recorder.end_rollout()
    with recorder.step(0, 0):
        recorder.record_policy_loss(0, list(records.values()), {"loss": math.nan})
    recorder.close()
    found = {(one.key.step_id, one.status) for one in captured(lake)}
    whole = {(None, "complete")} if retried else set()
    assert found == {(0, "complete"), (None, "dropped")} | whole
    assert ["recorded twice" in str(one.message) for one in told] == ([] if retried else [True])
    verdicts = {one.step_id: one.verdict for one in lake.replay().cohorts}
    assert retried or verdicts[None] == "refused"


def test_a_process_that_takes_no_steps_captures_the_rollouts_of_chosen_ones(lake: Lake) -> None:
    recorder = capture.enable(
        switched(lake, selection=Selection(steps="1:0,3:7")),
        settings=WAY.short,
        producer=ProducerInfo(role="driver"),
        attempt=0,
    )
    for rollout_id in range(5):
        record_rollout(recorder, rollout_id)
    recorder.close()
    assert kept(lake) == [(1, None), (3, None)]


@pytest.mark.parametrize("steps", [False, True])
def test_rollouts_that_waited_where_no_step_ever_came_are_told(lake: Lake, steps: bool) -> None:
    recorder = enabled(lake, selection=Selection(steps="1:0"))
    record_rollout(recorder, 0)
    if steps:
        record_step(recorder, drawn(), 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recorder.close()
    assert ["CAPTURE_ROLLOUTS" in str(one.message) for one in told] == ([] if steps else [True])


def test_what_takes_no_memory_waits_for_no_room(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    write = Background._write

    def late(self: Background, handoff: Handoff) -> None:
        started.wait(20.0)
        write(self, handoff)

    monkeypatch.setattr(Background, "_write", late)
    recorder = enabled(lake, strict=False, queue_bytes=1, wait_s=15.0)
    record_step(recorder, drawn())
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recorder._heartbeats.flush()  # type: ignore[attr-defined]
        recorder.begin_step(1, 0)
        recorder.drop("again")
    assert time.monotonic() - began < 10.0
    started.set()
    assert (recorder.close(), told) == (True, [])
    assert [one.status for one in captured(lake)] == ["complete", "dropped"]
    assert [one.key.kind for one in entries_of(lake)].count("events") == 2


BOUNDS: list[tuple[str, Mapping[str, float], bool]] = [
    ("nonfinite", {"loss": math.inf}, True),
    ("nonfinite", {"loss": math.nan}, True),
    ("nonfinite", {"loss": 1e30}, False),
    ("loss>5", {"loss": 5.5}, True),
    ("loss>5", {"loss": 5.0, "kl_loss": 9.0}, False),
    ("loss<-1.5e0", {"loss": -2.0}, True),
    ("exception", {"loss": math.nan}, False),
]


@pytest.mark.parametrize(("text", "scalars", "fires"), BOUNDS)
def test_triggers_look_at_scalars(text: str, scalars: dict[str, float], fires: bool) -> None:
    told = {name: [value] for name, value in scalars.items()}
    assert bool(Triggers(text).fired(told)) is fires


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["{!r}", "{:g}", "{:E}"]))
def test_a_bound_is_any_number_as_programs_write_it(bound: float, form: str) -> None:
    text = form.format(bound)
    (read,) = Triggers(f"loss>{text}").bounds
    assert read == ("loss", ">", float(text))


@pytest.mark.parametrize("text", ["", "loss", "loss>", "loss>x", "signal:", "signal:KILL", "a,,b"])
def test_triggers_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="a trigger is"):
        Triggers(text)


@pytest.mark.parametrize("told", [False, True])
def test_a_trigger_that_nobody_tells_its_number_is_warned_of_once(lake: Lake, told: bool) -> None:
    recorder = enabled(lake, strict=False, keep_last=1, triggers=Triggers("nonfinite,ratio>9"))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(2 * TOLD_WITHIN):
            recorder.begin_step(step, 0)
            # One of the first steps is enough, whatever the value.
            known = {"ratio": 1.0} if told and step == TOLD_WITHIN - 1 else {"grad_norm": 1.0}
            recorder.end_step(**known)
    recorder.close()
    assert ["a trigger looks at ratio" in str(one.message) for one in found] == (
        [] if told else [True]
    )


@pytest.mark.parametrize(("values", "fires"), [((1.0, 7.0), True), ((1.0, 2.0), False)])
def test_each_of_several_numbers_at_the_end_of_a_step_is_looked_at(
    lake: Lake, values: tuple[float, ...], fires: bool
) -> None:
    recorder = enabled(lake, keep_last=1, triggers=Triggers("ratio>5"))
    recorder.begin_step(0, 0)
    micro_batch(recorder, 0, drawn())
    recorder.end_step(ratio=tuple(map(torch.tensor, values)))
    recorder.close()
    assert kept(lake) == [(0, 0)] * fires


def test_numbers_that_are_given_at_the_end_of_a_step_are_looked_at(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=1, triggers=Triggers("grad_norm>100"))
    recorder.begin_step(0, 0)
    micro_batch(recorder, 0, drawn())
    recorder.end_step(grad_norm=1000.0)
    recorder.close()
    assert kept(lake) == [(0, 0)]


def test_a_signal_writes_what_is_held(lake: Lake) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    recorder = enabled(lake, strict=False, keep_last=2, triggers=Triggers("signal:USR2"))
    fly(recorder, 3)
    os.kill(os.getpid(), signal.SIGUSR2)
    for _ in range(200):
        if len(kept(lake)) >= 2 and recorder.flush(1.0):
            break
        time.sleep(0.02)
    recorder.close()
    assert (2, 0) in kept(lake)
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_signal_that_cannot_be_taken_is_warned_of(lake: Lake) -> None:
    found: list[Recorder] = []

    def start() -> None:
        triggers = Triggers("signal:USR2,signal:HUP")
        found.append(enabled(lake, strict=False, keep_last=1, triggers=triggers))

    before = signal.getsignal(signal.SIGUSR2)
    thread = threading.Thread(target=start)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread.start()
        thread.join()
    assert ["SIGUSR2, SIGHUP is not taken here" in str(one.message) for one in told] == [True]
    assert signal.getsignal(signal.SIGUSR2) is before
    found[0].close()


CAUGHT = """
import os, sys
from tests.helpers.recorded import enabled, micro_batch, record_rollout, record_step
from tests.helpers.scenes import drawn
recorder = enabled(sys.argv[1], strict=False, keep_last=2)
def train():
    for rollout_id in range(3):
        record_step(recorder, record_rollout(recorder, rollout_id), rollout_id)
    if sys.argv[2] != "between":
        with recorder.step(3, 0):
            micro_batch(recorder, 0, drawn(rollout_id=3))
            raise ZeroDivisionError
    raise ZeroDivisionError
try:
    train()
except ZeroDivisionError:
    if sys.argv[2] == "killed":
        assert recorder.flush(60.0)
        os._exit(1)
    if sys.argv[2] == "closed":
        recorder.close()
    sys.exit(1)
"""


@pytest.mark.parametrize("how", ["within", "between", "killed", "closed"])
def test_a_crash_that_is_caught_leaves_the_last_steps(lake: Lake, how: str) -> None:
    command = [sys.executable, "-c", CAUGHT, lake.path, how]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == 1
    steps = [one for one in kept(lake) if one[1] is not None]
    assert steps == ([(1, 0), (2, 0)] if how == "between" else [(2, 0)])
    told = ["the step ended with ZeroDivisionError" in one for one in reasons(lake)]
    assert told == [True] * (how != "between")
    assert len({one.producer["extra"]["trigger"] for one in captured(lake)}) == 1


def test_a_trigger_of_numbers_alone_leaves_nothing_of_a_crash(lake: Lake) -> None:
    recorder = enabled(lake, strict=False, keep_last=2, triggers=Triggers("nonfinite"))
    fly(recorder, 2)
    with pytest.raises(ZeroDivisionError), recorder.step(2, 0):
        raise ZeroDivisionError
    recorder.close()
    assert captured(lake) == []


ENDED = """
import os, signal, sys, time
from tests.helpers.recorded import enabled, record_rollout, record_step
from trajreplay.capture.switching.triggers import Triggers
recorder = enabled(sys.argv[1], strict=False, keep_last=2, triggers=Triggers("signal:TERM"))
for rollout_id in range(3):
    record_step(recorder, record_rollout(recorder, rollout_id), rollout_id)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60.0)
"""


def test_a_signal_that_ends_the_program_still_does_once_all_is_written(lake: Lake) -> None:
    command = [sys.executable, "-c", ENDED, lake.path]
    assert subprocess.run(command, cwd=ROOT, timeout=50).returncode == -signal.SIGTERM
    assert {(1, 0), (2, 0)} <= set(kept(lake))
    events = lake.sql("select event, count(*) as n from events group by 1").arrow()
    assert events.to_pylist() == [{"event": "heartbeat", "n": 3}]


def test_a_training_that_crashes_leaves_its_last_steps(lake: Lake) -> None:
    done: Any = subprocess.run(
        [sys.executable, "-m", "tests.helpers.recorded_training", lake.path, "crash"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert [one[0] for one in kept(lake)] == [2, 3]
    events = lake.sql("select event, count(*) as n from events group by 1").arrow()
    assert events.to_pylist() == [{"event": "heartbeat", "n": 4}]  # it did not end as it should


ANY_VALUE: list[tuple[str, str, list[Any], bool]] = [
    ("entropy_loss<0.1", "entropy_loss", [0.05, 2.0], True),
    ("loss<-5", "loss", [-6.0, 7.0], True),
    ("loss>5", "loss", [-9.0, 6.0], True),
    ("loss>5,loss<-5", "loss", [5.0, -5.0, 0.0], False),
    ("nonfinite", "loss", [1.0, np.float32("nan"), 2.0], True),
    ("nonfinite", "kl_loss", [1.0, torch.tensor(math.inf)], True),
    ("nonfinite", "kl_loss", [1.0, 10**6, np.float32(3.0)], False),
]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("text", "name", "values", "fires"), ANY_VALUE)
def test_every_value_of_a_scalar_is_looked_at(
    lake: Lake,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    name: str,
    values: list[Any],
    fires: bool,
    on_device: bool,
) -> None:
    device = Device(monkeypatch)
    recorder = enabled(lake, keep_last=1, triggers=Triggers(text))
    with recorder.step(0, 0):
        for index, value in enumerate(values):
            given = device.number(float(value)) if on_device else value
            part = drawn()[2 * index : 2 * index + 2]
            micro_batch(recorder, index, part, scalars={"loss": 0.0, name: given})
            if on_device:
                given.fill_(0.0)  # as a trainer does that adds up in place
    device.catch_up()
    recorder.close()
    assert kept(lake) == [(0, 0)] * fires


@settings(max_examples=10)  # each makes a lake
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=4),
    bound=st.one_of(st.none(), st.integers(-3, 3)),
    sign=st.sampled_from("<>"),
)
def test_a_bound_is_crossed_where_any_value_crosses_it(
    values: list[float], bound: int | None, sign: str
) -> None:
    text = "nonfinite" if bound is None else f"loss{sign}{bound}"
    crossed = {
        "nonfinite": lambda one: not math.isfinite(one),
        f"loss<{bound}": lambda one: one < bound,
        f"loss>{bound}": lambda one: one > bound,
    }[text]
    watch = Watch(Triggers(text))
    watch.add("step 0:0", {"loss": [tuple(values[:2]), *values[2:], "text", None]})
    ((step, fired),) = watch.look()
    assert (step, bool(fired)) == ("step 0:0", any(map(crossed, values)))


def test_no_training_waits_for_what_a_trigger_looks_at(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    recorder = enabled(lake, keep_last=1, triggers=Triggers("grad_norm>100"))
    for rollout_id in range(3):
        recorder.begin_step(rollout_id, 0)
        micro_batch(recorder, 0, drawn(rollout_id=rollout_id))
        if rollout_id == 2:
            device.catch_up()  # one step late, and before the ring lets go of that one
        recorder.end_step(grad_norm=device.number(50.0 + 100.0 * (rollout_id == 1)))
    recorder.flush()
    assert kept(lake) == [(1, 0)]
    device.catch_up()
    recorder.close()
    assert "grad_norm is 150" in str(lake.inspect(1, 0).to_json())


def test_a_loss_that_is_no_number_is_seen_after_its_capture_was_given_up(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=2)
    fly(recorder, 1)
    recorder.begin_step(1, 0)
    recorder.drop("a-test")
    micro_batch(recorder, 0, drawn(rollout_id=1), scalars={"loss": math.nan})
    recorder.end_step()
    recorder.close()
    assert (0, 0) in kept(lake)


def test_what_the_ring_holds_is_written_however_small_the_queue_is(lake: Lake) -> None:
    recorder = enabled(lake, strict=False, keep_last=3, queue_bytes=1)
    fly(recorder, 3)
    recorder.promote("a-call-of-a-test")
    recorder.close()
    assert reasons(lake) == []
    assert {(0, 0), (1, 0), (2, 0), (0, None), (1, None), (2, None)} == set(kept(lake))


def test_rollouts_that_waited_for_their_step_are_written_however_small_the_queue_is(
    lake: Lake,
) -> None:
    recorder = enabled(lake, strict=False, queue_bytes=1, selection=Selection(steps="1:0"))
    rollouts = [record_rollout(recorder, rollout_id) for rollout_id in range(2)]
    record_step(recorder, rollouts[0][:4] + rollouts[1][4:], 1, 0)
    recorder.close()
    assert (reasons(lake), kept(lake)) == ([], [(0, None), (1, None), (1, 0)])


def test_what_was_promoted_waits_within_the_bytes_of_the_ring(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Event()
    write = Background._write

    def late(self: Background, handoff: Handoff) -> None:
        started.wait(20.0)
        write(self, handoff)

    monkeypatch.setattr(Background, "_write", late)
    recorder = enabled(lake, strict=False, keep_last=8, ring_bytes=1 << 17)

    def train() -> None:
        for rollout_id in range(12):
            fly(recorder, 1, rollout_id)
            recorder.promote("again")

    with pytest.warns(CaptureWarning, match="was dropped: ring full"):
        train()
    started.set()
    recorder.close()
    assert kept(lake)
    assert "ring full" in reasons(lake)[-1]


@pytest.mark.filterwarnings("ignore::trajreplay.capture.CaptureWarning")
@pytest.mark.parametrize("promoted", [False, True])
def test_a_problem_makes_a_flight_recorder_write_nothing_more(lake: Lake, promoted: bool) -> None:
    recorder = enabled(lake, strict=False, keep_last=2)
    for rollout_id in range(4):
        samples = record_rollout(recorder, rollout_id)
        with recorder.step(rollout_id, 0):
            micro_batch(recorder, 0, samples)
            micro_batch(recorder, None, samples)
    recorder.begin_rollout(4)
    recorder.record([], tokens=object())
    recorder.end_rollout()
    if promoted:
        recorder.promote("a-call-of-a-test")
    recorder.close()
    found = {(one.key.rollout_id, one.key.step_id): one.status for one in captured(lake)}
    dropped = {place for place, status in found.items() if status == "dropped"}
    assert dropped == ({(2, 0), (3, 0), (4, None)} if promoted else set())
    assert bool(found) is promoted
    assert not promoted or {(2, None), (3, None)} <= set(kept(lake))


def test_what_was_let_go_is_noted_when_a_step_of_it_is_promoted(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=2)
    first = record_rollout(recorder, 0)
    for rollout_id in range(1, 12):
        record_rollout(recorder, rollout_id)
    record_step(recorder, first, 11, 0)
    recorder.promote("a-call-of-a-test")
    recorder.close()
    assert reasons(lake) == [GONE]
    assert (11, 0) in kept(lake)


@settings(max_examples=8)  # each makes a lake
@given(
    keep=st.integers(1, 3),
    ages=st.lists(st.integers(0, 10), min_size=1, max_size=8),
    problems=st.sets(st.integers(0, 7)),
)
def test_each_promoted_step_has_an_entry_of_every_rollout_that_it_consumed_from(
    keep: int, ages: list[int], problems: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lake = Lake.create(f"{folder}/lake")
        recorder = enabled(lake, strict=False, keep_last=keep)
        for step, age in enumerate(ages):
            with recorder.rollout(step):
                recorder.record([SampleRecord("s", 2, 3, [1, 1], raw_reward=1.0)])
            source = max(0, step - age)
            with recorder.step(step, 0):
                recorder.record_policy_loss(
                    0, [SampleRecord("s", 2, 3, [1, 1], source_rollout_id=source)], {"loss": 0.0}
                )
                if step in problems:
                    recorder.record_policy_loss(None, [])
        recorder.promote("a-call-of-a-test")
        recorder.close()
        found = {(one.key.rollout_id, one.key.step_id): one.status for one in captured(lake)}
        last = range(max(0, len(ages) - keep), len(ages))
        for step in last:
            assert found[step, 0] == ("dropped" if step in problems else "complete")
            assert (max(0, step - ages[step]), None) in found
        assert len([one for one in found if one[1] is not None]) == len(last)

"""The flight recorder: the last steps are held, and written when something goes wrong."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.helpers.processes import ROOT
from tests.helpers.recorded import (
    captured,
    enabled,
    micro_batch,
    reasons,
    record_rollout,
    record_step,
)
from tests.helpers.scenes import drawn
from trajreplay import Lake, SchemaError
from trajreplay.capture import Recorder, Selection
from trajreplay.capture.triggers import Triggers


def kept(lake: Lake) -> list[tuple[int | None, int | None]]:
    """What is in the lake as data: rollout and step."""
    found = [one for one in captured(lake) if one.status == "complete"]
    return sorted(
        [(one.key.rollout_id, one.key.step_id) for one in found],
        key=lambda one: (one[0], one[1] or -1),
    )


def fly(recorder: Recorder, rollouts: int) -> None:
    """Record rollouts with a step each."""
    for rollout_id in range(rollouts):
        record_step(recorder, record_rollout(recorder, rollout_id), rollout_id)


def test_nothing_is_written_until_a_trigger_fires(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=2)
    fly(recorder, 6)
    recorder.flush()
    assert kept(lake) == []
    recorder.promote("a call of a test")
    recorder.close()
    # Rollouts that no held step consumed from are there as well: their step may be the next.
    assert [one for one in kept(lake) if one[1] is not None] == [(4, 0), (5, 0)]
    assert {4, 5} <= {one for one, step in kept(lake) if step is None}
    assert lake.replay(steps=[(4, 0), (5, 0)]).verdict == "pass"
    told = lake.inspect(5, 0).to_json()
    assert "a call of a test" in str(told)


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


def test_what_is_chosen_is_written_all_the_same(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=2, selection=Selection(rollouts="1"))
    fly(recorder, 5)
    recorder.close()
    assert kept(lake) == [(1, None), (1, 0)]


def test_memory_bounds_what_is_held(lake: Lake) -> None:
    recorder = enabled(lake, keep_last=100, ring_bytes=1 << 17)
    fly(recorder, 12)
    recorder.promote("all")
    recorder.close()
    assert 0 < len(kept(lake)) < 8


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
    assert reasons(lake) == ["it was no longer held when a step that consumed from it was captured"]


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
    assert bool(Triggers(text).reason(scalars)) is fires


@pytest.mark.parametrize("text", ["", "loss", "loss>", "loss>x", "signal:", "signal:KILL", "a,,b"])
def test_triggers_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="a trigger is"):
        Triggers(text)


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


ENDED = """
import os, signal, sys, time
from tests.capture.test_ring import fly
from tests.helpers.recorded import enabled
from trajreplay.capture.triggers import Triggers
fly(enabled(sys.argv[1], strict=False, keep_last=2, triggers=Triggers("signal:TERM")), 3)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60.0)
"""


def test_a_signal_that_ends_the_program_still_does_once_all_is_written(lake: Lake) -> None:
    command = [sys.executable, "-c", ENDED, lake.path]
    assert subprocess.run(command, cwd=ROOT, timeout=50).returncode == -signal.SIGTERM
    assert {(1, 0), (2, 0)} <= set(kept(lake))


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

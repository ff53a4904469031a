"""Heartbeats: a few numbers of every optimizer step, captured or not, and how training ended."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trajreplay.capture.device import DeviceScalar, kept
from trajreplay.schema.events import ENDED_CLEAN, HEARTBEAT, HEARTBEAT_FIELDS, TERMINAL
from trajreplay.schema.records import SampleRecord

_FIELDS = {one.name for one in HEARTBEAT_FIELDS}
FAILED = "failed"
_AT_ONCE = 64
_LATEST_S = 10.0  # what a killed process may lose
Noted = tuple[str, int, dict[str, Any]]  # the event, its time in microseconds, its fields


@dataclass
class Beat:
    """What is noted of the open step, from what passes by anyway.

    Args:
        rollout_id, step_id: The step.
    """

    rollout_id: int
    step_id: int
    _losses: dict[int | None, Any] = field(default_factory=dict)
    _rewards: list[float | None] = field(default_factory=list)
    _truncated: list[bool | None] = field(default_factory=list)

    def micro_batch(
        self, index: int | None, samples: Sequence[SampleRecord], scalars: Mapping[str, Any]
    ) -> None:
        """Note one micro-batch, once however often it is seen."""
        if index in self._losses:
            return
        self._losses[index] = kept(scalars.get("loss"))
        self._rewards += [one.raw_reward for one in samples]
        self._truncated += [one.truncated for one in samples]

    def fields(self) -> dict[str, Any]:
        """The fields of its heartbeat; numbers on a device are not waited for."""
        found: dict[str, Any] = {"rollout_id": self.rollout_id, "step_id": self.step_id}
        losses = list(self._losses.values())
        if losses and all(one is not None for one in losses):
            found["loss"] = losses  # what was propagated back adds up to the loss of the step
        rewards = [one for one in self._rewards if one is not None and not math.isnan(one)]
        truncated = [one for one in self._truncated if one is not None]
        if rewards:
            found["reward_mean"] = sum(rewards) / len(rewards)
        if truncated:
            found["truncation_rate"] = sum(truncated) / len(truncated)
        return found


class Heartbeats:
    """Collects the heartbeats of a process and hands them over, some at once.

    Args:
        write: Takes the rollout and step that name a batch of events, and the events.
    """

    def __init__(self, write: Callable[[int | None, int | None, list[Noted]], None]) -> None:
        self._write = write
        self._waiting: list[Noted] = []
        self._since = time.monotonic()
        self._steps = 0

    def add(self, beat: Beat, given: Mapping[str, Any]) -> None:
        """Note the end of a step.

        Args:
            beat: What was seen of it.
            given: What the trainer says of it; fields that a heartbeat has none of are left out.
        """
        self._steps = int(given.get("step", self._steps + 1))
        told = {name: kept(value) for name, value in given.items() if name in _FIELDS}
        fields = {**beat.fields(), **told, "step": self._steps}
        self._waiting.append((HEARTBEAT, _now_us(), fields))
        if len(self._waiting) >= _AT_ONCE or time.monotonic() - self._since > _LATEST_S:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits."""
        self._since = time.monotonic()
        if self._waiting:
            batch, self._waiting = self._waiting, []
            first = batch[0][2]
            self._write(first["rollout_id"], first["step_id"], batch)

    def end(self, problem: str = "") -> None:
        """Note how the training ended: as it should, or with a problem."""
        self.flush()
        told = {"status": FAILED, "reason": problem} if problem else {"status": ENDED_CLEAN}
        fields = {**told, "steps": self._steps}
        # Events of no rollout and no step are those of an imported trace, whose key is another.
        self._write(None, self._steps, [(TERMINAL, _now_us(), fields)])


def problem_of_end(handled: BaseException | None, unended: Sequence[str]) -> str:
    """Why an end now is no clean one, or nothing.

    Args:
        handled: The exception that was being handled when training began, if any.
        unended: What is open.
    """
    error = sys.exc_info()[1]
    if error is not None and error is not handled:
        return f"{type(error).__name__} ends the training"  # its message may quote a prompt
    return f"a {unended[0]} was not ended" if unended else ""


def resolved(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as plain numbers and texts: losses added up, those on a device read."""
    return {
        name: math.fsum(map(float, value))
        if isinstance(value, list)
        else float(value)
        if isinstance(value, DeviceScalar)
        else value
        for name, value in fields.items()
    }


def _now_us() -> int:
    return time.time_ns() // 1000

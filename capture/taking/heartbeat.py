"""Heartbeats: a few numbers of every optimizer step, captured or not, and how training ended."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trajreplay.capture.taking.values import fixed, number, read
from trajreplay.schema.events import ENDED_CLEAN, HEARTBEAT, HEARTBEAT_FIELDS, TERMINAL
from trajreplay.schema.records import SampleRecord

_FIELDS = {one.name for one in HEARTBEAT_FIELDS}
FAILED = "failed"
_AT_ONCE = 64
_LATEST_S = 10.0  # what a killed process may lose
# The event, its time in microseconds, and its fields once it is written.
Noted = tuple[str, int, Callable[[], Mapping[str, Any]]]


class Reduced(NamedTuple):
    """A number that several make, once it is written.

    Args:
        reduce: Makes it.
        values: What `fixed` gave; those that are no numbers are left out.
    """

    reduce: Callable[[Sequence[float]], float | None]
    values: Sequence[Any]

    def read(self) -> float | None:
        """The number, None of no values; waits for a device."""
        told = [one for one in map(number, map(read, self.values)) if one is not None]
        return self.reduce(told) if told else None


@dataclass(slots=True, eq=False)
class Beat:
    """What is noted of the open step, from what passes by anyway.

    Args:
        rollout_id, step_id: The step.

    Attributes:
        told: Fields that the trainer told at its end.
    """

    rollout_id: int
    step_id: int
    _losses: dict[int | None, Any] = field(default_factory=dict)
    _rewards: list[Any] = field(default_factory=list)
    _truncated: list[Any] = field(default_factory=list)
    told: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"step {self.rollout_id}:{self.step_id}"

    def micro_batch(
        self, index: int | None, samples: Sequence[SampleRecord], scalars: Mapping[str, Any]
    ) -> None:
        """Note one micro-batch, once however often it is seen."""
        if index in self._losses:
            return
        self._losses[index] = number(scalars.get("loss"))
        # Most trainers tell them with the rollout, and not with the step.
        for one in samples:
            if one.raw_reward is not None or one.truncated is not None:
                self._add_outcomes(samples)
                break

    def _add_outcomes(self, samples: Sequence[SampleRecord]) -> None:
        told = [one.raw_reward for one in samples if one.raw_reward is not None]
        self._rewards += fixed(told)
        told = [one.truncated for one in samples if one.truncated is not None]
        self._truncated += fixed(told)

    @property
    def losses(self) -> list[Any]:
        """The losses of its micro-batches."""
        return list(self._losses.values())

    def fields(self) -> dict[str, Any]:
        """The fields of its heartbeat; what makes some of them, and what is read later."""
        found: dict[str, Any] = {"rollout_id": self.rollout_id, "step_id": self.step_id}
        if None not in self._losses.values():
            found["loss"] = Reduced(_sum, self.losses)  # what was propagated back adds up to it
        found["reward_mean"] = Reduced(_mean, self._rewards)
        found["truncation_rate"] = Reduced(_mean, self._truncated)
        return {**found, **self.told}


class Heartbeats:
    """Collects the heartbeats of a process and hands them over, some at once.

    Args:
        write: Takes the rollout and step that name a batch of events, and the events.
        counts: Whether this process saw all steps of the job. A resumed one did not: its steps have
            a number only where the trainer tells it.
    """

    def __init__(
        self, write: Callable[[int | None, int | None, list[Noted]], None], *, counts: bool = True
    ) -> None:
        self._write, self._counts = write, counts
        self._waiting: list[Noted] = []
        self._first = 0, 0  # the step that what waits is named after
        self._since = time.monotonic()
        self._steps = 0
        self._lock = threading.Lock()  # a signal that ends the program flushes in another thread

    def add(self, beat: Beat, given: Mapping[str, Any]) -> None:
        """Note the end of a step.

        Args:
            beat: What was seen of it.
            given: What the trainer says of it; fields that a heartbeat has none of are left out.
        """
        told: dict[str, Any] = {}
        for name, value in given.items():
            if name in _FIELDS and (plain := number(value)) is not None:
                told[name] = plain
        step = _whole(told.pop("step", None)) if told else None
        self._counts |= step is not None
        self._steps = self._steps + 1 if step is None else step
        beat.told = {**told, "step": self._steps} if self._counts else told
        with self._lock:
            if not self._waiting:
                self._first = beat.rollout_id, beat.step_id
            self._waiting.append((HEARTBEAT, _now_us(), beat.fields))
        if len(self._waiting) >= _AT_ONCE or time.monotonic() - self._since > _LATEST_S:
            self.flush()

    def flush(self) -> None:
        """Hand over what waits."""
        self._since = time.monotonic()
        with self._lock:
            first, batch, self._waiting = self._first, self._waiting, []
        if batch:
            self._write(*first, batch)

    def end(self, problem: str = "") -> None:
        """Note how the training ended: as it should, or with a problem."""
        self.flush()
        told = {"status": FAILED, "reason": problem} if problem else {"status": ENDED_CLEAN}
        fields = {**told, "steps": self._steps} if self._counts else told
        # Events of no rollout and no step are those of an imported trace, whose key is another.
        self._write(None, self._steps, [(TERMINAL, _now_us(), lambda: fields)])


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
    """Fields as plain numbers and texts; one that cannot be read is left out, and no other."""
    found = {}
    for name, value in fields.items():
        with contextlib.suppress(RuntimeError, TypeError, ValueError, OverflowError):
            plain = value.read() if isinstance(value, Reduced) else read(value)
            if plain is not None:
                found[name] = plain
    return found


def _sum(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum beyond all numbers
        return float(sum(values))


def _mean(values: Sequence[float]) -> float | None:
    told = [one for one in values if not math.isnan(one)]
    return _sum(told) / len(told) if told else None


def _whole(value: Any) -> int | None:
    """A count of steps; None where it is none, or not read yet."""
    known = isinstance(value, (int, float)) and math.isfinite(value)
    return int(value) if known else None


def _now_us() -> int:
    return time.time_ns() // 1000

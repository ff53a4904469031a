"""What a gate judges: the steps, ends and captures of the attempts that it names, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from trajreplay.query import Catalog
from trajreplay.query.catalog import Cohort, cohort_of
from trajreplay.schema.errors import DatasetError, TrajReplayError
from trajreplay.schema.events import HEARTBEAT, TERMINAL
from trajreplay.schema.identity import DATA, CaptureKey
from trajreplay.stages.gate.captured import captured_steps
from trajreplay.stages.gate.heartbeats import Values, number_of, over_ranks, read_events

Captured = tuple[int, int, int]  # attempt, rollout, step


@dataclass
class Evidence:
    """What was found of the attempts that a gate names.

    Args:
        catalog: The lake.
        run_id: The run.
        attempts: The attempts in the order of the chain; the last is the one that is judged.
        steps: By number, the first is 1, the values of each step.
        numbered_twice: Steps that more than one of the attempts recorded.
        ends: What the last attempt's terminal records say.
        records: How many captures and events the last attempt has.
        problems: Why something could not be read, or does not fit together.
        command_exit: Exit code of the command; None if it is not known or was killed.
        command_signal: The signal that killed it.
        only: The one capture set that is judged; all if omitted.
    """

    catalog: Catalog
    run_id: str
    attempts: tuple[int, ...]
    steps: dict[int, Values] = field(default_factory=dict)
    numbered_twice: list[int] = field(default_factory=list)
    ends: list[Values] = field(default_factory=list)
    records: int = 0
    problems: list[str] = field(default_factory=list)
    command_exit: int | None = None
    command_signal: int | None = None
    only: Cohort | None = None

    @property
    def last(self) -> int:
        """The attempt that is judged."""
        return self.attempts[-1]

    @property
    def started_s(self) -> float | None:
        """When the first of the attempts started, seconds since 1970."""
        record = self.catalog.attempt_record(self.run_id, self.attempts[0])
        return None if record is None else record.started_us / 1e6

    def values(self, name: str) -> list[float | None]:
        """A value of every step in order; None where it was not recorded."""
        return [number_of(self.steps[step].get(name)) for step in sorted(self.steps)]

    def numbers(self, name: str) -> tuple[list[float], str]:
        """The values of all steps, or why they are none that can be summed up."""
        values = self.values(name)
        steps = sorted(self.steps)
        missing = [step for step, value in zip(steps, values, strict=True) if value is None]
        if not steps:
            return [], "no step was recorded"
        if missing:
            return [], f"{name} was not recorded of step {', '.join(map(str, missing[:5]))}"
        known = [value for value in values if value is not None]
        odd = [step for step, value in zip(steps, known, strict=True) if not math.isfinite(value)]
        if odd:
            return [], f"{name} of step {', '.join(map(str, odd[:5]))} is not finite"
        return known, ""

    @property
    def mismatch_error(self) -> str:
        """Why statistics of the mismatch do not mean what they say, as their findings tell."""
        said = [one for step in self.steps.values() for one in step.get("mismatch_errors", ())]
        return said[0] if said else ""

    def captures(self) -> Iterator[CaptureKey]:
        """What the attempts captured, without what a later one of them replaced."""
        stops = self.stops()
        for attempt in self.attempts:
            for key in self.catalog.by_attempt.get((self.run_id, attempt), ()):
                stop = stops[attempt]
                if self.only and (key.rollout_id, key.step_id) != self.only[2:]:
                    continue
                if stop is None or key.rollout_id is None or key.rollout_id < stop:
                    yield key

    def cohorts(self) -> list[Cohort]:
        """The capture sets of the attempts, in report order."""
        found = {cohort_of(key) for key in self.captures() if key.kind != "events"}
        return sorted(found, key=lambda cohort: cohort.order)

    def stops(self) -> dict[int, int | None]:
        """By attempt, the first rollout that the next one replaces; None for all of it."""
        found: dict[int, int | None] = dict.fromkeys(self.attempts)
        for earlier, later in pairwise(self.attempts):
            resumed = self.catalog.resumed_from(self.run_id, later)
            if resumed is not None and resumed.attempt == earlier:
                found[earlier] = resumed.rollout_id
        return found


def gather(
    catalog: Catalog,
    run_id: str,
    attempts: Sequence[int],
    *,
    command_exit: int | None = None,
    command_signal: int | None = None,
    only: Cohort | None = None,
) -> Evidence:
    """Read what there is of the attempts; what cannot be read is a problem, never an error.

    Args:
        catalog: The lake.
        run_id: The run.
        attempts: The attempts named, in the order of the chain.
        command_exit: Exit code of the command.
        command_signal: The signal that killed it.
        only: Read only this capture set, and the events of its step.
    """
    found = Evidence(
        catalog,
        run_id,
        tuple(attempts),
        command_exit=command_exit,
        command_signal=command_signal,
        only=only,
    )
    _attempt(found, lambda: _check_chain(found))
    _attempt(found, lambda: _read_events(found))
    captured: dict[Captured, Values] = {}
    for attempt in found.attempts:
        _attempt(found, partial(_take, found, attempt, captured))
    _place(found, captured)
    found.records = len(catalog.by_attempt.get((run_id, found.last), ()))
    return found


def _take(found: Evidence, attempt: int, into: dict[Captured, Values]) -> None:
    """Add what an attempt captured before the next one of the chain replaced it."""
    stop = found.stops()[attempt]
    only = None if found.only is None else found.only[2:]
    for place, values in captured_steps(found.catalog, found.run_id, attempt, only).items():
        if stop is None or place[0] < stop:
            into[(attempt, *place)] = values


def _attempt(found: Evidence, work: Callable[[], object]) -> None:
    try:
        work()
    except TrajReplayError as error:
        found.problems.append(error.message)


def _check_chain(found: Evidence) -> None:
    for earlier, later in pairwise(found.attempts):
        resumed = found.catalog.resumed_from(found.run_id, later)
        if resumed is not None and resumed.attempt != earlier:
            found.problems.append(
                f"attempt {later} was resumed from attempt {resumed.attempt}, and the chain names "
                f"{earlier} before it"
            )


def _read_events(found: Evidence) -> None:
    beats: dict[int, list[tuple[int, Values]]] = {}
    stops = found.stops()
    for key in found.captures():
        if key.kind != "events" or key.part != DATA:
            continue
        for event, values in read_events(found.catalog, key):
            if event == TERMINAL and key.attempt == found.last:
                found.ends.append(values)
            if event != HEARTBEAT:
                continue
            step, rollout_id = values.get("step"), values.get("rollout_id", key.rollout_id)
            if type(step) is not int or step < 1:
                raise DatasetError(
                    f"attempt {key.attempt}: a heartbeat has the step {step!r}, expected a number "
                    "from 1 on"
                )
            stop = stops[key.attempt]
            if stop is None or rollout_id is None or rollout_id < stop:
                beats.setdefault(step, []).append((key.attempt, values))
    for step, told in beats.items():
        if len({attempt for attempt, _ in told}) > 1:
            found.numbered_twice.append(step)
        found.steps[step] = over_ranks([values for _, values in told]) | {"attempt": told[0][0]}


def _place(found: Evidence, captured: Mapping[Captured, Values]) -> None:
    """Put what was computed from captures on the steps of the heartbeats, or number them."""
    if not found.steps:
        for number, (attempt, values) in _numbered(captured):
            if number in found.steps:
                found.numbered_twice.append(number)
            found.steps[number] = values | {"attempt": attempt}
        return
    of_place = {
        (values.get("rollout_id"), values.get("step_id")): step
        for step, values in found.steps.items()
    }
    for (attempt, rollout_id, step_id), values in captured.items():
        step = of_place.get((rollout_id, step_id))
        if step is None:
            found.problems.append(
                f"attempt {attempt}: step {rollout_id}:{step_id} was captured and has no heartbeat"
            )
        else:
            found.steps[step] |= {name: one for name, one in values.items() if one is not None}


def _numbered(
    captured: Mapping[Captured, Values],
) -> Iterator[tuple[int, tuple[int, Values]]]:
    """Steps without heartbeats, counted in order; a number is left out for each gap."""
    number, last = 0, None
    for place in sorted(captured, key=lambda one: (one[1:], one[0])):
        attempt, rollout_id, step_id = place
        if last is not None and (rollout_id, step_id) != last:
            if rollout_id == last[0]:
                number += step_id - last[1]
            else:
                number += rollout_id - last[0] + step_id
        elif last is None:
            number = 1 + step_id
        last = rollout_id, step_id
        yield number, (attempt, captured[place])

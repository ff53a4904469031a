"""What a gate judges: the steps, ends and captures of the attempts that it names, and no others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise

from trajreplay.query import Catalog
from trajreplay.query.manifest.catalog import Cohort, cohort_of
from trajreplay.schema.identity import CaptureKey
from trajreplay.stages.gate.captured import MISMATCH, MISMATCH_ANY_VERSION
from trajreplay.stages.gate.heartbeats import Values, number_of
from trajreplay.stages.gate.telling import how_to_record

Process = tuple[int, str]  # rank and role
_TOLD = 5  # steps that a reason names
_NUMBER = "number "


@dataclass
class Evidence:
    """What was found of the attempts that a gate names.

    Args:
        catalog: The lake.
        run_id: The run.
        attempts: The attempts in the order of the chain; the last is the one that is judged.
        steps: By number, the first is 1, the values of each step.
        captured: Of the numbers, those whose captures are there, none missing or dropped.
        numbered_twice: Steps that more than one of the attempts recorded.
        ends: By rank, what each of the last attempt's terminal records says.
        telling: By attempt, the ranks that told of any step.
        capturing: By attempt, the ranks that captured a step, or whose captures one expects.
        recording: Ranks that the last attempt's captures are of, or expect.
        recorders: The rank and role of each process that recorded something of the last attempt:
            trainer and sampler may number theirs alike.
        closed: The rank and role of each that left a terminal record.
        told_last: By rank, the last step that it told of in the last attempt.
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
    captured: set[int] = field(default_factory=set)
    numbered_twice: list[int] = field(default_factory=list)
    ends: dict[int, list[Values]] = field(default_factory=dict)
    telling: dict[int, set[int]] = field(default_factory=dict)
    capturing: dict[int, set[int]] = field(default_factory=dict)
    recording: set[int] = field(default_factory=set)
    recorders: set[Process] = field(default_factory=set)
    closed: set[Process] = field(default_factory=set)
    told_last: dict[int, int] = field(default_factory=dict)
    records: int = 0
    problems: list[str] = field(default_factory=list)
    command_exit: int | None = None
    command_signal: int | None = None
    only: Cohort | None = None

    @property
    def last(self) -> int:
        """The attempt that is judged."""
        return self.attempts[-1]

    def window_s(self, attempt: int) -> tuple[float | None, float | None]:
        """When an attempt started and when the next one of the run did, seconds since 1970.

        None for what is not recorded, and for a next attempt where there is none.
        """
        records = [
            self.catalog.attempt_record(self.run_id, one)
            for one in self.catalog.runs.get(self.run_id, ())
            if one >= attempt
        ]
        started = {one.attempt: one.started_us / 1e6 for one in records if one is not None}
        start = started.get(attempt)
        later = [one for one in started.values() if start is not None and one > start]
        return start, min(later, default=None)

    @property
    def holes(self) -> list[int]:
        """The first few steps that are missing between others."""
        gaps = (range(one + 1, later) for one, later in pairwise(sorted(self.steps)))
        return list(islice(chain.from_iterable(gaps), 6))

    def each_name(self, steps: Iterable[int]) -> list[str]:
        """Steps as the command line takes them, `R:S`; by number if the place is not known."""
        places = Counter(map(self._place, self.steps))
        return [
            f"{place[0]}:{place[1]}"
            if None not in (place := self._place(step)) and places[place] == 1
            else f"{_NUMBER}{step}"
            for step in steps
        ]

    def name(self, step: int) -> str:
        """One of them."""
        return self.each_name([step])[0]

    def names(self, steps: Iterable[int]) -> str:
        """The first few of some, as words of a reason that come after `step`."""
        some = list(islice(steps, _TOLD + 1))
        told = self.each_name(some[:_TOLD])
        numbers = [one.removeprefix(_NUMBER) for one in told if one.startswith(_NUMBER)]
        placed = ", ".join(one for one in told if not one.startswith(_NUMBER))
        numbered = _NUMBER + ", ".join(numbers) if numbers else ""
        more = " ..." if len(some) > _TOLD else ""
        return " and ".join(one for one in (placed, numbered) if one) + more

    @property
    def standing(self) -> set[int]:
        """The attempts of which something counts: a step, or a capture that none replaced."""
        of_steps = {values["attempt"] for values in self.steps.values()}
        return of_steps | {key.attempt for key in self.captures() if key.kind != "events"}

    @property
    def not_captured(self) -> list[int]:
        """Steps that heartbeats tell of, and whose captures are not all there."""
        return sorted(self.steps.keys() - self.captured)

    def _place(self, step: int) -> tuple[int | None, int | None]:
        values = self.steps.get(step, {})
        return values.get("rollout_id"), values.get("step_id")

    def measured(self, *, any_version: bool) -> Evidence:
        """The same, with the mismatch of what was captured among the values of its steps.

        Args:
            any_version: Whether that counts tokens, too, which other weights sampled.
        """
        source = MISMATCH_ANY_VERSION if any_version else MISMATCH
        steps = {step: values | values.get(source, {}) for step, values in self.steps.items()}
        return replace(self, steps=steps)

    def values(self, name: str) -> list[float | None]:
        """A value of every step in order; None where it was not recorded."""
        return [number_of(self.steps[step].get(name)) for step in sorted(self.steps)]

    def unrecorded(self, name: str, steps: Iterable[int]) -> str:
        """That some steps lack a value, and what gives it to them."""
        return f"{name} was not recorded of step {self.names(steps)}: {how_to_record(name)}"

    def numbers(self, name: str) -> tuple[list[float], str]:
        """The values of all steps, or why they are none that can be summed up."""
        values = self.values(name)
        steps = sorted(self.steps)
        missing = [step for step, value in zip(steps, values, strict=True) if value is None]
        if not steps:
            return [], "no step was recorded"
        if missing:
            return [], self.unrecorded(name, missing)
        known = [value for value in values if value is not None]
        odd = [step for step, value in zip(steps, known, strict=True) if not math.isfinite(value)]
        if odd:
            return [], f"{name} of step {self.names(odd)} is not finite"
        return known, ""

    def captures(self) -> Iterator[CaptureKey]:
        """What the attempts captured, without what a later one of them replaced."""
        stops = self.stops()
        for attempt in self.attempts:
            for key in self.catalog.by_attempt.get((self.run_id, attempt), ()):
                stop = stops[attempt]
                if self.only and key.kind != "events" and key[3:5] != self.only[2:]:
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

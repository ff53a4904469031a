"""Evidence read for a gate: heartbeats and ends, values of captures, and the two put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from trajreplay.query import Catalog
from trajreplay.query.catalog import Cohort
from trajreplay.schema.errors import DatasetError, TrajReplayError, shown
from trajreplay.schema.events import HEARTBEAT, TERMINAL
from trajreplay.schema.identity import DATA, CaptureKey
from trajreplay.stages.gate.captured import OF_MISMATCH, captured_steps
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import Values, over_ranks, read_events

Captured = tuple[int, int, int]  # attempt, rollout, step
Place = tuple[int, int]  # rollout, step


def gather(
    catalog: Catalog,
    run_id: str,
    attempts: Sequence[int],
    *,
    command_exit: int | None = None,
    command_signal: int | None = None,
    only: Cohort | None = None,
    reads: Collection[str],
) -> Evidence:
    """Read what there is of the attempts; what cannot be read is a problem, never an error.

    Args:
        catalog: The lake.
        run_id: The run.
        attempts: The attempts named, in the order of the chain.
        command_exit: Exit code of the command.
        command_signal: The signal that killed it.
        only: Read only this capture set, and the events of its step.
        reads: Which of SOURCES are wanted of what was captured.
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
    _attempt(found, lambda: _read_ranks(found))
    _attempt(found, lambda: _read_events(found))
    captured: dict[Captured, Values] = {}
    for attempt in found.attempts:
        _attempt(found, partial(_take, found, attempt, captured, reads))
    _place(found, captured)
    found.records = len(catalog.by_attempt.get((run_id, found.last), ()))
    return found


def _take(
    found: Evidence, attempt: int, into: dict[Captured, Values], reads: Collection[str]
) -> None:
    """Add what an attempt captured before the next one of the chain replaced it."""
    stop = found.stops()[attempt]
    only = None if found.only is None else found.only[2:]
    steps = captured_steps(found.catalog, found.run_id, attempt, only, reads=reads)
    for place, values in steps.items():
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


def _read_ranks(found: Evidence) -> None:
    for key in found.captures():
        if key.kind == "events":
            continue
        ranks = {key.rank, *found.catalog.entry(key).expected_ranks}
        if key.attempt == found.last:
            found.recording |= ranks
        if key.kind == "step":
            found.ranks.setdefault(key.attempt, set()).update(ranks)


def _read_events(found: Evidence) -> None:
    beats: dict[int, list[tuple[int, int, Values]]] = {}  # by step: attempt, rank, values
    uncounted: dict[tuple[int, Place], list[tuple[int, Values]]] = {}  # by attempt and place
    stops = found.stops()
    for key in _events(found):
        for event, values in read_events(found.catalog, key):
            if event == TERMINAL and key.attempt == found.last:
                found.ends[key.rank] = values
            if event != HEARTBEAT:
                continue
            step, rollout_id = _checked(key.attempt, values)
            if found.only and (rollout_id, values.get("step_id")) != found.only[2:]:
                continue
            found.ranks.setdefault(key.attempt, set()).add(key.rank)
            stop = stops[key.attempt]
            if stop is not None and rollout_id is not None and rollout_id >= stop:
                continue
            if step is None:
                place = values["rollout_id"], values["step_id"]
                uncounted.setdefault((key.attempt, place), []).append((key.rank, values))
            else:
                beats.setdefault(step, []).append((key.attempt, key.rank, values))
    _count(found, beats, uncounted)
    for step, told in beats.items():
        attempts = {attempt for attempt, _, _ in told}
        if len(attempts) > 1:
            found.numbered_twice.append(step)
        ranks = {(attempt, rank) for attempt, rank, _ in told}
        silent = sum(len(found.ranks[attempt]) for attempt in attempts) - len(ranks)
        values = over_ranks([values for _, _, values in told], silent=silent)
        found.steps[step] = values | {"attempt": told[0][0]}


def _count(
    found: Evidence,
    beats: dict[int, list[tuple[int, int, Values]]],
    uncounted: Mapping[tuple[int, Place], list[tuple[int, Values]]],
) -> None:
    """Number the steps of resumed attempts that count none: on from those before, in order.

    Raises:
        DatasetError: Those before are not known, or a rank told twice of one.
    """
    for (attempt, place), heard in uncounted.items():
        if len({rank for rank, _ in heard}) < len(heard):
            raise DatasetError(
                f"attempt {attempt}: a rank has two heartbeats of step {place[0]}:{place[1]}, and "
                "they have no number"
            )
    if uncounted and not found.only:
        _check_whole(beats, uncounted)
    for attempt in sorted({one for one, _ in uncounted}):
        if attempt == found.attempts[0] and not found.only:
            raise DatasetError(
                f"attempt {attempt}: a heartbeat has no step, and no attempt that this one "
                "continues is judged with it"
            )
        before = max((step for step, told in beats.items() if told[0][0] < attempt), default=0)
        places = sorted(place for one, place in uncounted if one == attempt)
        for step, place in enumerate(places, before + 1):
            told = [(attempt, rank, values) for rank, values in uncounted[attempt, place]]
            beats.setdefault(step, []).extend(told)


def _check_whole(
    beats: Mapping[int, list[tuple[int, int, Values]]],
    uncounted: Mapping[tuple[int, Place], list[tuple[int, Values]]],
) -> None:
    """Refuse to number steps of which one may be missing: of no rollout, and of none its last.

    Raises:
        DatasetError: There is a rollout without steps between others, or one with others than its
            neighbours have; the last may not be done yet.
    """
    places = {place for _, place in uncounted}
    for told in beats.values():
        for _, _, values in told:
            places.add((values.get("rollout_id", -1), values.get("step_id", -1)))
    steps: dict[int, set[int]] = {}
    for rollout_id, step_id in places:
        steps.setdefault(rollout_id, set()).add(step_id)
    first, last = min(steps), max(steps)
    usual = set(range(len(steps[first])))
    for rollout_id in range(first, last + 1):
        there = steps.get(rollout_id, set())
        done = usual if rollout_id < last else set(range(min(len(there), len(usual))))
        if there != done:
            raise DatasetError(
                f"heartbeats have no step, and of rollout {rollout_id} there are those of the "
                f"steps {sorted(there)[:5]}, expected {sorted(usual)[:5]}: one may be missing"
            )


def _checked(attempt: int, values: Values) -> tuple[int | None, int | None]:
    """The number of a heartbeat's step and its rollout, as far as it says which step it is of.

    One that has no number says its rollout and its place in that.
    """
    named = values.get("rollout_id") is not None and values.get("step_id") is not None
    for name, first in (("step", 1), ("rollout_id", 0), ("step_id", 0)):
        value = values.get(name)
        if value is None and (name != "step" or named):
            continue
        if type(value) is not int or not first <= value < 1 << 63:
            raise DatasetError(
                f"attempt {attempt}: a heartbeat has a {name} that is {shown(value)}, expected a "
                f"number from {first} on"
            )
    return values.get("step"), values.get("rollout_id")


def _events(found: Evidence) -> Iterator[CaptureKey]:
    """Captures of events; of a single step those of each rank that can hold its heartbeat.

    A recorder writes several heartbeats at a time, under the name of the first one's step, or of
    one after it in the rollout where that step was tried before.
    """
    keys = [key for key in found.captures() if key.kind == "events" and key.part == DATA]
    if found.only is None:
        yield from keys
        return
    latest: dict[int, CaptureKey] = {}
    for key in keys:
        if key.rollout_id is None:
            continue
        if key.rollout_id == found.only.rollout_id:
            yield key
        elif key.rollout_id < (found.only.rollout_id or 0):
            latest[key.rank] = max(latest.get(key.rank, key), key, key=_place_of)
    yield from latest.values()


def _place_of(key: CaptureKey) -> tuple[int, int]:
    return key.rollout_id or 0, key.step_id or 0


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
        elif found.steps[step]["attempt"] != attempt:
            found.numbered_twice.append(step)
        else:
            # What a rank told of tokens does not stand for captures that are missing.
            told = {name: one for name, one in found.steps[step].items() if name not in OF_MISMATCH}
            found.steps[step] = told | {n: one for n, one in values.items() if one is not None}


def _numbered(
    captured: Mapping[Captured, Values],
) -> Iterator[tuple[int, tuple[int, Values]]]:
    """Steps without heartbeats, counted in order; a number is left out for each gap.

    Trainers count rollouts from 0 or 1: what begins with a later one has steps before it.
    """
    number, last = 0, None
    for place in sorted(captured, key=lambda one: (one[1:], one[0])):
        attempt, rollout_id, step_id = place
        if last is not None and (rollout_id, step_id) != last:
            if rollout_id == last[0]:
                number += step_id - last[1]
            else:
                number += rollout_id - last[0] + step_id
        elif last is None:
            number = max(rollout_id, 1) + step_id
        last = rollout_id, step_id
        yield number, (attempt, captured[place])

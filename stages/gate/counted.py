"""Heartbeats and ends of the attempts of a chain, and the number of the step that each is of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError, shown
from trajreplay.schema.events import HEARTBEAT, TERMINAL
from trajreplay.schema.identity import DATA, CaptureKey
from trajreplay.stages.gate.captured import OF_MISMATCH, StepPlace
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import Values, over_ranks, read_events


def read_steps(found: Evidence) -> None:
    """Read the heartbeats of all steps and the ends of all ranks into the evidence.

    Raises:
        DatasetError: A heartbeat does not say which step it is of, and it cannot be counted.
    """
    beats: dict[int, list[tuple[int, int, Values]]] = {}  # by step: attempt, rank, values
    uncounted: dict[tuple[int, StepPlace], list[tuple[int, Values]]] = {}  # by attempt and place
    stops = found.stops()
    for key in _events(found):
        for event, values in read_events(found.catalog, key):
            if key.attempt == found.last:
                _note_process(found, key, event, values)
            if event != HEARTBEAT:
                continue
            step, rollout_id = _checked(key.attempt, values)
            if found.only and (rollout_id, values.get("step_id")) != found.only[2:]:
                continue
            found.telling.setdefault(key.attempt, set()).add(key.rank)
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
        silent = sum(len(found.telling[attempt]) for attempt in attempts) - len(ranks)
        values = over_ranks([values for _, _, values in told], silent=silent)
        # A loss may be told by one rank for all; tokens that a rank captures, it alone can tell of.
        capturing = {(one, rank) for one in attempts for rank in found.capturing.get(one, ())}
        if not capturing <= ranks:
            values = {name: one for name, one in values.items() if name not in OF_MISMATCH}
        found.steps[step] = values | {"attempt": told[0][0]}


def _note_process(found: Evidence, key: CaptureKey, event: str, values: Values) -> None:
    """Note which process of the last attempt told something, how far it came and how it ended."""
    process = key.rank, role_of(found.catalog.entry(key))
    found.recorders.add(process)
    if event == TERMINAL:
        found.ends.setdefault(key.rank, []).append(values)
        found.closed.add(process)
    else:
        step, _ = _checked(key.attempt, values)
        found.told_last[key.rank] = max(found.told_last.get(key.rank, 0), step or 0)


def _count(
    found: Evidence,
    beats: dict[int, list[tuple[int, int, Values]]],
    uncounted: Mapping[tuple[int, StepPlace], list[tuple[int, Values]]],
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
    uncounted: Mapping[tuple[int, StepPlace], list[tuple[int, Values]]],
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


def role_of(entry: Entry) -> str:
    """What the process that recorded it is for: train, rollout, driver."""
    return str(entry.producer.get("role", ""))


def _place_of(key: CaptureKey) -> tuple[int, int]:
    return key.rollout_id or 0, key.step_id or 0

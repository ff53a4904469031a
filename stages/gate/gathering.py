"""Evidence read for a gate: the chain, values of captures, and the heartbeats beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise

from trajreplay.query import Catalog
from trajreplay.query.manifest.capture_sets import read_capture_set
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.errors import TrajReplayError
from trajreplay.stages.gate.captured import OF_MISMATCH, captured_steps
from trajreplay.stages.gate.counted import read_steps, role_of
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import Values
from trajreplay.stages.gate.order import Captured, check_order, numbered, shorter_rollouts


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
    _attempt(found, lambda: read_steps(found))
    captured: dict[Captured, Values] = {}
    for attempt in found.attempts:
        _attempt(found, partial(_take, found, attempt, captured, reads))
    for key in (one for one in found.captures() if one.kind == "step"):
        # Of a capture that is refused a heartbeat tells as little as of one that is missing.
        place = key.rollout_id or 0, key.step_id or 0
        captured.setdefault((key.attempt, *place), _named(*place))
    _place(found, captured)
    check_order(found)
    _find_captured(found)
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
            into[(attempt, *place)] = values | _named(*place)


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
        entry = found.catalog.entry(key)
        ranks = {key.rank, *entry.expected_ranks}
        if key.attempt == found.last:
            found.recording |= ranks
            found.recorders.add((key.rank, role_of(entry)))
        if key.kind == "step":
            found.capturing.setdefault(key.attempt, set()).update(ranks)


def _place(found: Evidence, captured: Mapping[Captured, Values]) -> None:
    """Put what was computed from captures on the steps of the heartbeats, or number them."""
    if not found.steps:
        found.problems += shorter_rollouts(captured)
        for number, (attempt, values) in numbered(captured):
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


def _named(rollout_id: int, step_id: int) -> Values:
    return {"rollout_id": rollout_id, "step_id": step_id}


def _find_captured(found: Evidence) -> None:
    """Note of which steps the captures are there, which a heartbeat alone does not say."""
    whole: set[tuple[int | None, ...]] = set()
    for cohort in (one for one in found.cohorts() if one.step_id is not None):
        with suppress(TrajReplayError):  # what cannot be read is not there; who reads it says so
            if read_capture_set(found.catalog, cohort).complete:
                whole.add(cohort[1:])
    for step, values in found.steps.items():
        if tuple(values.get(name) for name in ("attempt", "rollout_id", "step_id")) in whole:
            found.captured.add(step)

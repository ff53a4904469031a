"""The order of steps: numbers of those that were captured, and attempts that follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import Values

Captured = tuple[int, int, int]  # attempt, rollout, step


def check_order(found: Evidence) -> None:
    """Make a problem of attempts that do not follow each other, step after step.

    All steps of a later attempt are beyond those of the earlier ones, and none is of a rollout
    before that from which it was resumed.
    """
    attempts = {step: values["attempt"] for step, values in sorted(found.steps.items())}
    for earlier, later in pairwise(attempts):
        if attempts[earlier] > attempts[later]:
            found.problems.append(
                f"attempt {attempts[later]} has step {found.name(later)}, behind step "
                f"{found.name(earlier)} of attempt {attempts[earlier]}, which comes after it"
            )
            break
    for attempt in found.attempts:
        resumed = found.catalog.resumed_from(found.run_id, attempt)
        before = [
            step
            for step, of in attempts.items()
            if of == attempt
            and resumed is not None
            and (rollout := found.steps[step].get("rollout_id")) is not None
            and rollout < resumed.rollout_id
        ]
        if before and resumed is not None:
            found.problems.append(
                f"attempt {attempt} was resumed at rollout {resumed.rollout_id} and recorded step "
                f"{found.names(before)}"
            )


def shorter_rollouts(places: Iterable[Captured]) -> Iterator[str]:
    """Rollouts of which the last steps may be missing, as those around them have more.

    The last one may not be done yet, and of two nothing tells which is the usual one.
    """
    steps: dict[int, set[int]] = {}
    for _, rollout_id, step_id in places:
        steps.setdefault(rollout_id, set()).add(step_id)
    counts = [(rollout_id, max(steps[rollout_id]) + 1) for rollout_id in sorted(steps)]
    for place, (rollout_id, count) in enumerate(counts[:-1]):
        first = max(place - 1, 0)
        around = [one for one in counts[first : first + 3] if one[0] != rollout_id]
        if len(around) == 2 and all(more > count for _, more in around):
            told = " and ".join(f"{more} of rollout {other}" for other, more in around)
            yield (
                f"rollout {rollout_id} has {count} captured steps, between {told}: one may be "
                "missing, which a heartbeat would tell"
            )


def numbered(
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

"""What is known of a policy before a run begins: that no run can hold it as it stands."""

from __future__ import annotations

import time
from pathlib import Path

from trajreplay.schema.errors import QueryError, listed
from trajreplay.stages.gate.of_mismatch import PATIENCE, WINDOW
from trajreplay.stages.gate.of_routes import unstated
from trajreplay.stages.gate.policy import Policy


def check_meetable(policy: Policy, where: str) -> None:
    """Refuse a policy that fails whatever a run does that begins now.

    What a lake lacks fails a gate; where the run is still to come it is told before that.

    Args:
        policy: What the run is to be held against, with what the command line states.
        where: Where it stands, which the refusal begins with.

    Raises:
        QueryError: A check of it lacks what it is made with, or bounds what cannot be.
    """
    problems = [*_of_routes(policy), *_of_baseline(policy)]
    if problems:
        raise QueryError(
            f"{where}: no run can hold it: {listed(problems)}",
            hint="Nothing was run. State what is missing in the policy or on the command line.\n"
            "A check of a preset that a run has no use for is left out: NAME = false in [checks].",
        )


def _of_routes(policy: Policy) -> list[str]:
    given = policy.checks.get("routes")
    if given is None:
        return []
    found = [f"routes: {one}" for one in unstated(given)]
    folder = given.get("traces")
    if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
        found.append(f"routes: traces is {folder!r}, a file, expected a folder")
    until = given.get("until")
    if until is not None and until <= time.time():
        found.append(f"routes: until is {until!r}, and every trace that is to come is later")
    return found


def _of_baseline(policy: Policy) -> list[str]:
    given = policy.checks.get("mismatch_baseline")
    if given is None or policy.max_steps is None:
        return []
    window, patience = given.get("window", WINDOW), given.get("patience", PATIENCE)
    if policy.max_steps >= window + patience:
        return []
    wanted = f"{window} steps of warm-up, and {patience} on end that can be above"
    told = f"max_steps is {policy.max_steps}, expected {window + patience} or more: {wanted}"
    return [f"mismatch_baseline: {told}"]

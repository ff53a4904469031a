"""What is known of a policy before a run begins: that no run can hold it as it stands."""

from __future__ import annotations

import time
from pathlib import Path

from trajreplay.schema.errors import QueryError, listed
from trajreplay.stages.gate.policy import Policy

_WINDOW = 3  # steps of a warm-up where a policy states none, as of `judge_mismatch_baseline`


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
    found = []
    folder = given.get("traces")
    if folder is None:
        found.append(
            "routes: no folder of traces is named: checks.routes.traces, or --traces; a policy of "
            "a run that replays none says routes = false under [checks]"
        )
    elif Path(folder).exists() and not Path(folder).is_dir():
        found.append(f"routes: traces is {folder!r}, a file, expected a folder")
    if "contract" not in given:
        found.append("routes: no contract is stated: checks.routes.contract, or --contract")
    until = given.get("until")
    if until is not None and until <= time.time():
        found.append(f"routes: until is {until!r}, and every trace that is to come is later")
    return found


def _of_baseline(policy: Policy) -> list[str]:
    given = policy.checks.get("mismatch_baseline")
    if given is None or policy.max_steps is None:
        return []
    window = given.get("window", _WINDOW)
    if policy.max_steps > window:
        return []
    found = f"max_steps is {policy.max_steps}, and the first {window} steps are the warm-up"
    return [f"mismatch_baseline: {found}, so that none is left to be held against it"]

"""Checks that a run learned: rewards that differ, a loss, answers that end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import is_number, total
from trajreplay.stages.gate.policy import Policy


def _share(
    found: Evidence,
    policy: Policy,
    given: Parameters,
    names: Sequence[str],
    holds: Callable[[Mapping[str, Any]], bool],
) -> Judged:
    share, steps = given.get("share", 0.8), policy.max_steps or 0
    needed = at_least(share, steps)
    count = sum(holds(values) for step, values in found.steps.items() if step <= steps)
    bound = f"at least {needed} of {steps} steps"
    if policy.run == "intermediate":
        return Judged(None, count, bound, "shares are judged over the whole chain")
    reason = ""
    if count < needed:
        reason = f"{count} of {len(found.steps)} recorded steps have it"
        for name in names:
            lacking = [step for step in sorted(found.steps) if found.steps[step].get(name) is None]
            if lacking:
                reason += f"; {found.unrecorded(name, lacking)}"
                break
    return Judged(count >= needed, count, bound, reason)


def at_least(share: float, steps: int) -> int:
    """The least number of steps that is a share of all.

    >>> at_least(0.8, 10), at_least(0.8, 11), at_least(0.1, 30)
    (8, 9, 3)
    """
    exact = share * steps
    nearest = round(exact)
    return nearest if math.isclose(exact, nearest, rel_tol=1e-12) else math.ceil(exact)


def judge_learning_signal(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """Rewards differ within a group, and an advantage is not 0, in enough steps."""
    names = ("reward_std", "advantage_abs_max")

    def holds(values: Mapping[str, Any]) -> bool:
        return all(_positive(values.get(name)) for name in names)

    return _share(found, policy, given, names, holds)


def judge_nonzero_loss(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The loss is finite and other than 0 in enough steps."""

    def holds(values: Mapping[str, Any]) -> bool:
        return is_number(values.get("loss")) and values["loss"] != 0

    return _share(found, policy, given, ("loss",), holds)


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def judge_truncation(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """Few samples were cut at the length limit."""
    below = given.get("below", 0.9)
    bound = f"mean over steps < {below}"
    values, problem = found.numbers("truncation_rate")
    if problem:
        return Judged(False, None, bound, problem)
    rate = total(values) / len(values)
    if any(not 0 <= one <= 1 for one in values):
        return Judged(False, rate, bound, "a rate is outside of 0 to 1")
    return Judged(rate < below, rate, bound, "" if rate < below else f"it is {rate}")

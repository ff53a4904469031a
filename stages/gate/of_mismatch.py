"""Checks of how far the trainer is from the sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.policy import Policy, is_number


def judge_delta_tail(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """No valid token of any step differs by more than 1.0."""
    bound = "no valid token with |delta log p| > 1.0 nat"
    if not found.steps:
        return Judged(False, None, bound, "no step was recorded")
    if problem := found.mismatch_error:
        return Judged(False, None, bound, problem)
    largest = 0.0
    for step in sorted(found.steps):
        values = found.steps[step]
        told: dict[str, Any] = {
            name: values[name]
            for name in ("over_1_0", "abs_delta_max")
            if values.get(name) is not None
        }
        if not told:
            return Judged(False, None, bound, f"neither count nor maximum of step {step} recorded")
        odd = [name for name, value in told.items() if not is_number(value) or value < 0]
        if odd:
            return Judged(False, told[odd[0]], bound, f"{odd[0]} of step {step} is {told[odd[0]]}")
        largest = max(largest, told.get("abs_delta_max", 0.0))
        if told.get("over_1_0", 0) > 0 or told.get("abs_delta_max", 0.0) > 1.0:
            return Judged(False, largest, bound, f"step {step} has one")
    return Judged(True, largest, bound)


def judge_delta_fraction(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """Few valid tokens of all steps together differ by more than 0.5."""
    below = given.get("below", 1e-4)
    bound = f"share of valid tokens with |delta log p| > 0.5 nat < {below}"
    counts, problem = found.numbers("over_0_5")
    tokens, missing = found.numbers("valid_tokens")
    if problem := problem or missing or found.mismatch_error:
        return Judged(False, None, bound, problem)
    if any(one < 0 for one in (*counts, *tokens)) or math.fsum(tokens) <= 0:
        return Judged(False, None, bound, "there is no valid token")
    share = math.fsum(counts) / math.fsum(tokens)
    return Judged(share < below, share, bound, "" if share < below else f"it is {share}")


def judge_generation_kl(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The mean of the steps' k3 is small, and none is negative."""
    below = given.get("below", 0.001)
    bound = f"mean over steps < {below} nat, none negative"
    values, problem = found.numbers("generation_kl")
    if problem := problem or found.mismatch_error:
        return Judged(False, None, bound, problem)
    mean = math.fsum(values) / len(values)
    if min(values) < 0:
        return Judged(False, mean, bound, "one is negative, which k3 cannot be: it is another KL")
    return Judged(mean < below, mean, bound, "" if mean < below else f"it is {mean}")


def judge_mismatch_baseline(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The mismatch stays near that of the run's own first steps."""
    name, window = given.get("statistic", "abs_delta"), given.get("window", 3)
    factor, patience = given.get("factor", 5.0), given.get("patience", 1)
    bound = (
        f"{name} at most {factor} x its mean over the first {window} steps, or above it in fewer "
        f"than {patience} steps on end"
    )
    values, problem = found.numbers(name)
    if problem := _without_start(found) or problem or found.mismatch_error:
        return Judged(False, None, bound, problem)
    if len(values) <= window:
        return Judged(
            False, None, bound, f"{len(values)} steps were recorded, expected more than {window}"
        )
    usual = math.fsum(values[:window]) / window
    limit = factor * usual
    alarm = first_alarm(values[window:], limit, patience)
    if alarm is None:
        return Judged(True, max(values[window:]), bound)
    step, value = sorted(found.steps)[window + alarm], values[window + alarm]
    against = f"{limit:.6g} nat, {factor:g} x the {usual:.6g} nat of the first {window} steps"
    if not usual:
        against = f"the first {window} steps, in which sampler and trainer were equal"
    return Judged(
        False, value, bound, f"step {step} is the first above, {value:.6g} nat against {against}"
    )


def _without_start(found: Evidence) -> str:
    """Why the first steps that are named are not those of the run."""
    first = found.attempts[0]
    resumed = found.catalog.resumed_from(found.run_id, first)
    if resumed is None:
        return ""
    chain = ",".join(map(str, (resumed.attempt, *found.attempts)))
    return (
        f"attempt {first} continues attempt {resumed.attempt}, so that its first steps are no "
        f"warm-up: name the whole chain, --attempts {chain}"
    )


def first_alarm(values: Sequence[float], limit: float, patience: int) -> int | None:
    """Where the first stretch of so many values above a limit begins.

    >>> first_alarm([0.01, 0.19, 0.01, 0.19, 0.21], 0.06, 2)
    3
    """
    above = 0
    for place, value in enumerate(values):
        above = above + 1 if value > limit else 0
        if above == patience:
            return place - patience + 1
    return None

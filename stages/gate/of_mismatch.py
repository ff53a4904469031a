"""Checks of how far the trainer is from the sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trajreplay.stages.gate.captured import (
    EQUAL_TOKENS,
    MISMATCH_ERRORS,
    MISMATCH_NOTES,
    OF_OTHER_VERSION,
)
from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import is_number, total
from trajreplay.stages.gate.policy import Policy
from trajreplay.stages.gate.possible import impossible

# Of a baseline, where a policy states none: steps of the warm-up, and on end above the bound.
WINDOW, PATIENCE = 3, 1
_OF_TAIL = ("over_1_0", "abs_delta_max")


def judge_delta_tail(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """No valid token of any step differs by more than 1.0."""
    bound = "no valid token with |delta log p| > 1.0 nat"
    if not found.steps:
        return Judged(False, None, bound, "no step was recorded")
    found, problem = _measured(found, given)
    if problem:
        return Judged(False, None, bound, problem)
    largest = 0.0
    for step in sorted(found.steps):
        values = found.steps[step]
        told = {name: values[name] for name in _OF_TAIL if values.get(name) is not None}
        if not told:
            lacking = [
                number
                for number, one in sorted(found.steps.items())
                if all(one.get(name) is None for name in _OF_TAIL)
            ]
            return Judged(False, None, bound, found.unrecorded("abs_delta_max", lacking))
        odd = [name for name, value in told.items() if not is_number(value) or value < 0]
        if odd:
            reason = f"{odd[0]} of step {found.name(step)} is {told[odd[0]]}"
            return Judged(False, told[odd[0]], bound, reason)
        largest = max(largest, told.get("abs_delta_max", 0.0))
        if told.get("over_1_0", 0) > 0 or told.get("abs_delta_max", 0.0) > 1.0:
            return Judged(False, largest, bound, f"step {found.name(step)} has one")
    return Judged(True, largest, bound, _reserve(found))


def judge_delta_fraction(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """Few valid tokens of all steps together differ by more than 0.5."""
    below = given.get("below", 1e-4)
    bound = f"share of valid tokens with |delta log p| > 0.5 nat < {below}"
    found, problem = _measured(found, given)
    counts, uncounted = found.numbers("over_0_5")
    tokens, missing = found.numbers("valid_tokens")
    if problem := problem or uncounted or missing:
        return Judged(False, None, bound, problem)
    if any(one < 0 for one in (*counts, *tokens)) or total(tokens) <= 0:
        return Judged(False, None, bound, "there is no valid token")
    share = total(counts) / total(tokens)
    return Judged(
        share < below, share, bound, _reserve(found) if share < below else f"it is {share}"
    )


def judge_generation_kl(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The mean of the steps' k3 is small, and none is negative."""
    below = given.get("below", 0.001)
    bound = f"mean over steps < {below} nat, none negative"
    found, problem = _measured(found, given)
    values, missing = found.numbers("generation_kl")
    if problem := problem or missing:
        return Judged(False, None, bound, problem)
    mean = total(values) / len(values)
    if min(values) < 0:
        return Judged(False, mean, bound, "one is negative, which k3 cannot be: it is another KL")
    return Judged(mean < below, mean, bound, _reserve(found) if mean < below else f"it is {mean}")


def judge_mismatch_baseline(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The mismatch stays near that of the run's own first steps."""
    name, window = given.get("statistic", "abs_delta"), given.get("window", WINDOW)
    factor, patience = given.get("factor", 5.0), given.get("patience", PATIENCE)
    bound = (
        f"{name} at most {factor} x its mean over the first {window} steps, or above it in fewer "
        f"than {patience} steps on end"
    )
    found, problem = _measured(found, given)
    values, missing = found.numbers(name)
    if problem := _without_start(found) or problem or missing:
        return Judged(False, None, bound, problem)
    first = sorted(found.steps)[:window]
    if first != list(range(1, len(first) + 1)):
        return Judged(
            False,
            None,
            bound,
            f"the warm-up is the steps number 1 to {window}, and the first that were recorded are "
            f"number {', '.join(map(str, first[:5]))}, step {found.names(first)}",
        )
    if len(values) < window + patience:  # fewer than patience can never be above on end
        told = f"{len(values)} steps were recorded, expected {window} and then {patience} or more"
        return Judged(False, None, bound, told)
    usual = total(values[:window]) / window
    limit = factor * usual
    if min(values) < 0 or not math.isfinite(limit):
        return Judged(False, min(values), bound, f"{name} is {min(values)} to {max(values)}")
    alarm = first_alarm(values[window:], limit, patience)
    if alarm is None:
        return Judged(True, max(values[window:]), bound, _reserve(found))
    step, value = sorted(found.steps)[window + alarm], values[window + alarm]
    against = f"{limit:.6g} nat, {factor:g} x the {usual:.6g} nat of the first {window} steps"
    if not usual:
        against = f"the first {window} steps, in which sampler and trainer were equal"
    return Judged(
        False,
        value,
        bound,
        f"step {found.name(step)} is the first above, {value:.6g} nat against {against}",
    )


def _measured(found: Evidence, given: Parameters) -> tuple[Evidence, str]:
    """The steps with the mismatch that a check asks for, and why it is not what was asked for."""
    found = found.measured(any_version=given.get("any_version", False))
    counts = {step: one.get(OF_OTHER_VERSION, 0) for step, one in sorted(found.steps.items())}
    steps = [step for step, count in counts.items() if count]
    if steps:
        return found, (
            f"{sum(counts.values())} valid tokens of step {found.names(steps)} were sampled by "
            "other weights than recomputed them, and are not compared; any_version = true counts "
            "them, too"
        )
    said = [one for step in found.steps.values() for one in step.get(MISMATCH_ERRORS, ())]
    return found, said[0] if said else _equal(found) or impossible(found)


def _reserve(found: Evidence) -> str:
    """What a pass leaves open: which steps nobody captured, and what only one side states."""
    told = []
    if found.captured and found.not_captured:
        told.append(f"of step {found.names(found.not_captured)} by what heartbeats tell")
    notes = (one for step in found.steps.values() for one in step.get(MISMATCH_NOTES, ()))
    return "; ".join((*told, *dict.fromkeys(notes)))


def _equal(found: Evidence) -> str:
    """Why the divergence of trainer and sampler is 0 by construction, not by what they compute.

    No two engines agree in every bit of a step; of heartbeats, which may be rounded, all are asked.
    """
    equal = [
        step
        for step, one in sorted(found.steps.items())
        if one.get(EQUAL_TOKENS) and one[EQUAL_TOKENS] == one.get("valid_tokens")
    ]
    if equal:
        told = found.names(equal)
        return f"trainer and sampler are equal in every token of step {told}: one is a copy"
    names = ("generation_kl", "abs_delta_max", "abs_delta")
    said = [
        one[name] for one in found.steps.values() for name in names if one.get(name) is not None
    ]
    if said and all(is_number(one) and one == 0 for one in said):
        return "the mismatch of every step is exactly 0: one of its columns is a copy of the other"
    return ""


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

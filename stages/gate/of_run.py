"""Checks of how a run went: command, attempt, steps, clean end."""

from __future__ import annotations

from trajreplay.schema.errors import listed
from trajreplay.schema.events import ENDED_CLEAN
from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.policy import Policy


def judge_command(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The command ended with exit code 0."""
    bound = "exit code 0"
    if found.command_signal is not None:
        return Judged(
            False, None, bound, f"the command was killed by signal {found.command_signal}"
        )
    if found.command_exit is None:
        return Judged(False, None, bound, "the exit code of the command is not known")
    return Judged(
        found.command_exit == 0,
        found.command_exit,
        bound,
        "" if found.command_exit == 0 else f"the command ended with {found.command_exit}",
    )


def judge_attempt(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The attempt recorded steps of its own, and all that counts fits together."""
    bound = "at least one record of it, and all that count readable"
    runs = found.catalog.runs
    if found.run_id not in runs:
        there = ", ".join(map(repr, runs)) or "none"
        return Judged(False, 0, bound, f"there is no run {found.run_id!r}; the lake has {there}")
    if found.problems:
        return Judged(False, found.records, bound, listed(found.problems, 3))
    if found.numbered_twice:
        steps = ", ".join(map(str, found.numbered_twice[:3]))
        return Judged(
            False, found.records, bound, f"step {steps} was recorded by two attempts of the chain"
        )
    if not any(values.get("attempt") == found.last for values in found.steps.values()):
        return Judged(
            False, found.records, bound, f"attempt {found.last} recorded no step of its own"
        )
    return Judged(True, found.records, bound)


def judge_complete(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The loss of every step was recorded."""
    with_loss = [step for step, values in found.steps.items() if values.get("loss") is not None]
    steps = policy.max_steps or 0
    if policy.run == "intermediate":
        last = max(found.steps, default=0)
        first = min(found.steps, default=1)
        bound = f"at least one step, none left out, at most {steps}"
        missing = [one for one in range(first, last + 1) if one not in with_loss]
        passed = bool(with_loss) and not missing and last <= steps
    else:
        bound = f"a loss of every step from 1 to {steps}"
        missing = [one for one in range(1, steps + 1) if one not in with_loss]
        passed = not missing and max(found.steps, default=0) <= steps
    reason = ""
    if not passed:
        beyond = [one for one in with_loss if one > steps]
        told = missing or beyond
        shown = ", ".join(map(str, told[:5])) + (" ..." if len(told) > 5 else "")
        what = "has no loss" if missing else "is beyond the last"
        reason = f"step {shown} {what}" if told else "no step was recorded"
    return Judged(passed, len(with_loss), bound, reason)


def judge_terminal(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The attempt's recorder closed after a clean end."""
    bound = f"a closing record of each rank of attempt {found.last}, all {ENDED_CLEAN}"
    if not found.ends:
        return Judged(False, 0, bound, "there is none: the recorder was not closed")
    open_ranks = sorted(found.ranks.get(found.last, set()) - set(found.ends))
    if open_ranks:
        told = ", ".join(map(str, open_ranks[:5]))
        return Judged(
            False, len(found.ends), bound, f"rank {told} told of steps and was not closed"
        )
    odd = [one for one in found.ends.values() if one.get("status") != ENDED_CLEAN]
    reason = f"one says {odd[0].get('status')!r}: {odd[0].get('reason')}" if odd else ""
    return Judged(not odd, len(found.ends), bound, reason)

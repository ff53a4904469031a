"""Checks of how a run went: command, attempt, steps, clean end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from trajreplay.schema.errors import listed
from trajreplay.schema.events import ENDED_CLEAN
from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import number_of
from trajreplay.stages.gate.of_experts import NAME as AGREEMENT
from trajreplay.stages.gate.of_experts import holds_experts
from trajreplay.stages.gate.policy import Policy
from trajreplay.stages.gate.telling import how_to_record

_TOLD = 5  # steps or ranks that a reason names


def judge_command(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The command ended with exit code 0."""
    bound = "exit code 0"
    if found.command_signal is not None:
        return Judged(
            False, None, bound, f"the command was killed by signal {found.command_signal}"
        )
    if found.command_exit is None:
        return Judged(
            False,
            None,
            bound,
            "the exit code of the command is not known: --command-exit, or certify",
        )
    return Judged(
        found.command_exit == 0,
        found.command_exit,
        bound,
        "" if found.command_exit == 0 else f"the command ended with {found.command_exit}",
    )


def misfit(found: Evidence, policy: Policy) -> str:
    """Why nothing of the attempts holds: it cannot be read, or does not fit together.

    Steps that are missing are those of `complete`, where the policy makes that check.
    """
    if found.problems:
        return listed(found.problems, 3)
    if found.numbered_twice:
        steps = found.names(found.numbered_twice)
        return f"step {steps} was recorded by two attempts of the chain"
    if found.holes and "complete" not in policy.checks:
        after = found.name(max(one for one in found.steps if one < found.holes[0]))
        return f"step {found.names(found.holes)} is missing, after step {after} and before others"
    return ""


def unasked(found: Evidence, policy: Policy) -> tuple[str, ...]:
    """The checks that are made whether or not a policy names them, since nothing holds with it."""
    failed = found.command_signal is not None or found.command_exit not in (None, 0)
    replayed = "routes" in policy.checks and holds_experts(found, policy)
    found_out = {
        "command": failed,
        "attempt": bool(misfit(found, policy)),
        AGREEMENT: replayed,
    }
    return tuple(name for name, fails in found_out.items() if fails)


def judge_attempt(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The attempt recorded steps of its own, and all that counts fits together."""
    bound = "at least one record of it, and all that count readable"
    runs = found.catalog.runs
    if found.run_id not in runs:
        there = ", ".join(map(repr, runs)) or "none"
        return Judged(False, 0, bound, f"there is no run {found.run_id!r}; the lake has {there}")
    if problem := misfit(found, policy):
        return Judged(False, found.records, bound, problem)
    if not any(values.get("attempt") == found.last for values in found.steps.values()):
        return Judged(
            False, found.records, bound, f"attempt {found.last} recorded no step of its own"
        )
    return Judged(True, found.records, bound)


def judge_complete(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The loss of every step was recorded."""
    with_loss = {step for step, values in found.steps.items() if values.get("loss") is not None}
    steps = policy.max_steps or 0
    last = max(found.steps, default=0)
    if policy.run == "intermediate":
        bound = f"at least one step, none left out, at most {steps}"
        wanted = range(min(found.steps, default=1), last + 1)
    else:
        bound = f"a loss of every step from 1 to {steps}"
        wanted = range(1, steps + 1)
    # As many as are told: a run may state far more steps than it has.
    missing = list(islice((one for one in wanted if one not in with_loss), _TOLD + 1))
    reason = ""
    if not found.steps:
        reason = "no step was recorded"
    elif missing:
        reason = f"step {found.names(missing)} has no loss"
        if any(one in found.steps for one in missing):
            reason += f": {how_to_record('loss')}"
    elif last > steps:
        beyond = sorted(one for one in found.steps if one > steps)
        reason = f"step {found.names(beyond)} is beyond the last of max_steps, number {steps}"
    return Judged(not reason, len(with_loss), bound, reason)


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_TOLD])) + (" ..." if len(ranks) > _TOLD else "")


def judge_terminal(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The attempt's recorder closed after a clean end."""
    bound = f"a closing record of each rank of attempt {found.last}, all {ENDED_CLEAN}"
    if not found.ends:
        reason = (
            "there is none: the recorder was not closed, or TRAJREPLAY_CAPTURE_CLOSE_S was over "
            "before all was written"
        )
        return Judged(False, 0, bound, reason)
    ranks = found.telling.get(found.last, set()) | found.recording
    if open_ranks := sorted(ranks - set(found.ends)):
        told = _shown(open_ranks)
        return Judged(
            False, len(found.ends), bound, f"rank {told} recorded, or should have: it is not closed"
        )
    if left := sorted(found.recorders - found.closed):
        rank, role = left[0]
        reason = f"of rank {rank} a process of role {role!r} recorded, and it is not closed"
        return Judged(False, len(found.ends), bound, reason)
    for rank, last in sorted(found.told_last.items()):
        counts = [number_of(one.get("steps")) for one in found.ends[rank]]
        known = [one for one in counts if one is not None]
        if known and len(known) == len(counts) and not max(known) >= last:
            reason = (
                f"rank {rank} told of step number {last}, and closed after {max(known):g} steps: "
                "another process has its number, and did not close"
            )
            return Judged(False, len(found.ends), bound, reason)
    told_ends = [one for of_rank in found.ends.values() for one in of_rank]
    odd = [one for one in told_ends if one.get("status") != ENDED_CLEAN]
    reason = f"one says {odd[0].get('status')!r}: {odd[0].get('reason')}" if odd else ""
    return Judged(not odd, len(found.ends), bound, reason)

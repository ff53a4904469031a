"""The check of router-replay traces: whose they are, of which steps, and that they are valid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trajreplay.query.routes import (
    CONTRACTS,
    RoutePolicy,
    RouteReport,
    check_routes,
    count_records,
    policy_of,
)
from trajreplay.query.routes.whose import RULE as WHOSE
from trajreplay.query.routes.whose import TRAIN
from trajreplay.schema.errors import listed
from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.of_attempt import facts_of
from trajreplay.stages.gate.of_experts import holds_experts
from trajreplay.stages.gate.policy import GATE_KEYS, Policy
from trajreplay.stages.gate.verdict import NAMED

_TOLD = 5  # steps that a reason names
_HOW_MANY = "NRL_R3_TRACE_STEPS of the job says how many are"
_CHOOSERS = ("since", "until", "processes")


def judge_routes(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """Route traces are valid under the contract that the policy states, of enough steps."""
    bound = f"valid under {given.get('contract', 'a contract that is not stated')}"
    wanted = given.get("traced_steps")
    if wanted is not None:
        bound += f", {_told(wanted)} traced"
    if problems := unstated(given):
        return Judged(False, None, bound, "; ".join(problems))
    chain = _Chain(found, given)
    for attempt in found.attempts:
        if problem := chain.take(attempt):
            return Judged(False, chain.value or None, bound, problem)
    if wanted is not None and (problem := chain.lacks(wanted)):
        return Judged(False, chain.value, bound, problem)
    told = [f"says nothing of {'; '.join(chain.silent)}"] if chain.silent else []
    told += chain.unverified
    if not holds_experts(found, policy):
        told.append("no choices of experts are captured")
    return Judged(True, chain.value, bound, "; ".join(told))


@dataclass
class _Chain:
    """The traces of the attempts of a chain, one after another.

    Args:
        found: What is judged.
        given: What the policy states.
        value: By attempt, what was found.
        traced: By stage, the steps whose passes were traced.
        counts: By stage, how many those are.
        silent: Steps of which the traces say nothing, in words.
        unverified: What they leave open of whose they are.
    """

    found: Evidence
    given: Parameters
    value: dict[str, dict[str, Any]] = field(default_factory=dict)
    traced: dict[str, set[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    silent: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)

    def take(self, attempt: int) -> str:
        """Check the traces of an attempt; why they fail, or nothing."""
        found, given = self.found, self.given
        start, stop = found.window_s(attempt)
        if start is None and given.get("since") is None:
            return f"when attempt {attempt} started is not recorded"
        stated = _route_policy(given, start, stop)
        report = check_routes(Path(given["traces"]), stated, facts_of(found, attempt))
        steps = [one for one in sorted(found.steps) if found.steps[one]["attempt"] == attempt]
        mine = {
            stage: _steps_of(found, steps, stage, passes) for stage, passes in report.steps.items()
        }
        untraced = [one for one in steps if not all(one in mine.get(x, ()) for x in stated.stages)]
        self.value[str(attempt)] = {
            "records": report.records,
            "left_out": report.left_out,
            "traced": {stage: found.each_name(some[:NAMED]) for stage, some in mine.items()},
            "untraced": found.each_name(untraced[:NAMED]),
        }
        if attempt != found.last and not report.records:
            # It may have kept its traces elsewhere: what is certified is not certified of these.
            if reason := _set_aside(given, start, stop):
                return f"attempt {attempt}: {reason}"
            self.silent.append(
                f"step {found.names(steps)} of attempt {attempt}, which left no trace"
            )
            return ""
        if report.verdict != "pass":
            return f"attempt {attempt}: {_why(report)}"
        for stage in stated.stages:
            self.traced.setdefault(stage, set()).update(mine.get(stage, ()))
            # Where nobody told of any step the passes are counted, and other checks fail.
            self.counts[stage] += len(mine.get(stage, ()) if steps else report.steps.get(stage, ()))
        if untraced:
            self.silent.append(f"step {found.names(untraced)} of attempt {attempt}, not traced")
        self.unverified += [
            f"attempt {attempt}: {one.message}"
            for one in report.findings
            if (one.rule, one.severity) == (WHOSE, "unverified")
        ]
        return ""

    def lacks(self, wanted: Any) -> str:
        """Why the steps that were traced are not those that the policy wants, stage by stage."""
        for stage, steps in self.traced.items():
            if isinstance(wanted, int):
                if self.counts[stage] < wanted:
                    return (
                        f"of {stage} {self.counts[stage]} steps are traced, expected {wanted} or "
                        f"more: {_HOW_MANY}"
                    )
                continue
            names = set(self.found.each_name(steps))
            every = self.found.each_name(sorted(self.found.steps)) if wanted == "all" else wanted
            missing = [one for one in every if one not in names]
            if missing or not every:
                more = " ..." if len(missing) > _TOLD else ""
                told = f"step {', '.join(missing[:_TOLD])}{more}" if missing else "any step"
                return f"of {stage} {told} is not traced: {_HOW_MANY}"
        return ""


def unstated(given: Parameters) -> list[str]:
    """What a policy has to state of routes, and does not."""
    found = []
    if given.get("traces") is None:
        found.append(
            "no folder of traces is named: checks.routes.traces, or --traces; a policy of a run "
            "that replays none says routes = false under [checks]"
        )
    if "contract" not in given:
        allowed = " or ".join(CONTRACTS)
        found.append(f"no contract is stated: {allowed}, as checks.routes.contract, or --contract")
    return found


def _route_policy(given: Parameters, start: float | None, stop: float | None) -> RoutePolicy:
    """What the traces of one attempt are held against: no record from outside its time counts."""
    stated = {name: one for name, one in given.items() if name not in GATE_KEYS}
    since = [one for one in (stated.get("since"), start) if one is not None]
    until = [one for one in (stated.get("until"), stop) if one is not None]
    within = {"since": max(since, default=None), "until": min(until, default=None)}
    return policy_of(stated | within, "checks.routes")


def _set_aside(given: Parameters, start: float | None, stop: float | None) -> str:
    """That an attempt left records, which the policy leaves out."""
    stated = [name for name in _CHOOSERS if given.get(name) not in (None, [], ())]
    if not stated:
        return ""
    whole = {name: one for name, one in given.items() if name not in _CHOOSERS}
    left = count_records(Path(given["traces"]), _route_policy(whole, start, stop))
    if not left:
        return ""
    names = ", ".join(f"checks.routes.{name}" for name in stated)
    return (
        f"{names} leaves out all of its {left} records: what is stated of times and "
        "processes holds for every attempt of the chain"
    )


def _steps_of(
    found: Evidence, steps: Sequence[int], stage: str, passes: Sequence[int]
) -> list[int]:
    """The steps of an attempt that numbered passes of a stage are of, those that stand.

    A trainer enters train once an optimizer step, and prev-logprob once a rollout, before these.
    """
    rollouts: dict[Any, list[int]] = {}
    for step in steps:
        place = found.steps[step].get("rollout_id")
        alone = stage == TRAIN or place is None
        rollouts.setdefault(("step", step) if alone else place, []).append(step)
    by_pass = list(rollouts.values())
    return [one for number in passes for one in (by_pass[number - 1 : number] or [[]])[0]]


def _told(wanted: Any) -> str:
    """Which steps a policy wants, in words."""
    if isinstance(wanted, int):
        return f"{wanted} step{'s' * (wanted != 1)} or more"
    return "every step" if wanted == "all" else f"step {', '.join(wanted)}"


def _why(report: RouteReport) -> str:
    """The first rule that is broken, else those that the policy has decided, and are not."""
    failures = [one for one in report.findings if one.severity == "failure"]
    if failures:
        return f"{failures[0].rule}: {failures[0].message}"
    told = {one.rule: one.message for one in reversed(report.findings) if one.severity != "remark"}
    return listed(
        f"{rule} is {report.statuses[rule]}, and has to be decided"
        + (f": {told[rule]}" if rule in told else "")
        for rule in report.undecided
    )

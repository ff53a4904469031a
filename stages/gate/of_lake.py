"""Checks of route traces, of captures, and that they recompute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trajreplay.query.capture_sets import read_capture_set
from trajreplay.query.catalog import Cohort
from trajreplay.query.routes import RouteReport, check_routes, policy_of
from trajreplay.schema.errors import listed
from trajreplay.schema.identity import DROPPED
from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.policy import Policy
from trajreplay.stages.gate.verdict import NAMED


def judge_routes(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """Route traces are valid under the contract that the policy states."""
    bound = f"valid under {given.get('contract', 'a contract that is not stated')}"
    stated = dict(given)
    folder = stated.pop("traces", None)
    if folder is None:
        return Judged(
            False,
            None,
            bound,
            "no folder of traces is named: checks.routes.traces, or --traces; a policy of a run "
            "that replays none says routes = false under [checks]",
        )
    if "contract" not in stated:
        return Judged(False, None, bound, "no contract is stated: checks.routes.contract")
    value: dict[str, dict[str, Any]] = {}
    untraced: list[str] = []
    for attempt in found.attempts:
        start, stop = found.window_s(attempt)
        since = [one for one in (stated.get("since"), start) if one is not None]
        until = [one for one in (stated.get("until"), stop) if one is not None]
        if not since:
            return Judged(False, None, bound, f"when attempt {attempt} started is not recorded")
        within = stated | {"since": max(since), "until": min(until, default=None)}
        report = check_routes(Path(folder), policy_of(within, "checks.routes"))
        value[str(attempt)] = {
            "records": report.records,
            "left_out": report.left_out,
            "traced_steps": dict(report.steps),
        }
        if attempt != found.last and not report.records:
            # It may have kept its traces elsewhere: what is certified is not certified of these.
            steps = [one for one in sorted(found.steps) if found.steps[one]["attempt"] == attempt]
            value[str(attempt)]["untraced"] = found.each_name(steps[:NAMED])
            untraced += [f"step {found.names(steps)} of attempt {attempt}"] if steps else []
            continue
        if report.verdict != "pass":
            return Judged(False, value, bound, f"attempt {attempt}: {_why(report)}")
    reason = f"not of {'; '.join(untraced)}, which left no trace" if untraced else ""
    return Judged(True, value, bound, reason)


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


def judge_captures(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """Every capture set of the attempts is complete, none was dropped, and no step left out."""
    bound = "at least one capture, none dropped, every set complete"
    chosen = given.get("chosen", False)
    if not chosen:
        bound += ", of every step that was recorded"
    cohorts = found.cohorts()
    if not cohorts:
        return Judged(False, 0, bound, "nothing was captured")
    dropped = [key for key in found.captures() if key.part == DROPPED]
    if dropped:
        return Judged(False, len(cohorts), bound, f"{len(dropped)} dropped, first {dropped[0]}")
    for cohort in cohorts:
        refusals = read_capture_set(found.catalog, cohort).refusals()
        if refusals:
            return Judged(False, len(cohorts), bound, f"{_named(cohort)}: {refusals[0]}")
    if found.not_captured and not chosen:
        return Judged(
            False,
            len(cohorts),
            bound,
            f"captured {len(found.captured)} of {len(found.steps)} steps, not step "
            f"{found.names(found.not_captured)}; chosen = true allows what was left out by choice",
        )
    return Judged(True, len(cohorts), bound)


def _named(cohort: Cohort) -> str:
    """A capture set as a reason names it: a step as the command line takes it."""
    if cohort.step_id is None:
        return f"rollout {cohort.rollout_id}"
    return f"step {cohort.rollout_id}:{cohort.step_id}"


def judge_replay(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """Every cohort of the attempts recomputes."""
    from trajreplay.query import Selection
    from trajreplay.stages.plan import replay

    allowed = ("pass", "precision") if policy.allow_precision else ("pass",)
    bound = f"verdict {' or '.join(allowed)} of every cohort"
    verdicts: dict[str, int] = {}
    reason = ""
    stops = found.stops()
    for attempt in found.attempts:
        if not any(cohort.attempt == attempt for cohort in found.cohorts()):
            if attempt in found.standing and not reason:
                reason = f"nothing of attempt {attempt} was captured, so that nothing is replayed"
            continue
        stop = "" if stops[attempt] is None else f" AND rollout_id < {stops[attempt]}"
        report = replay(
            found.catalog,
            Selection(run=found.run_id, attempt=attempt, where=f"attempt = {attempt}{stop}"),
        )
        for one in report.cohorts:
            verdicts[one.verdict] = verdicts.get(one.verdict, 0) + 1
            if one.verdict not in allowed and not reason:
                cohort = Cohort(one.run_id, one.attempt, one.rollout_id, one.step_id)
                reason = f"{_named(cohort)} is {one.verdict}"
    if not verdicts:
        return Judged(False, {}, bound, "nothing was replayed")
    return Judged(not reason, verdicts, bound, reason)

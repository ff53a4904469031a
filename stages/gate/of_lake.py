"""Checks that captures are whole, and that they recompute."""

from __future__ import annotations

from trajreplay.query.manifest.capture_sets import read_capture_set
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.identity import DROPPED
from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.policy import Policy


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
    from trajreplay.stages.replaying.plan import replay

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

"""Explaining what contract checks found: the mistake that each finding is known as."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from trajreplay.query import Cohort
from trajreplay.stages.explain.explanation import Explanation, Hypothesis
from trajreplay.stages.faults import Fault, reported
from trajreplay.stages.report import CohortReport, Divergence, Finding

_SHOWN = 3


def explain_findings(
    report: CohortReport, place: Cohort, severity: str, faults: Sequence[Fault]
) -> Iterator[Explanation]:
    """The explanation of every finding of a severity that has the name of a fault.

    Args:
        report: What a replay found of a cohort.
        place: Its coordinates.
        severity: error or warning.
        faults: The catalogue.
    """
    known = {one.id: one for one in faults if one.tries is None and one.hands is None}
    for finding in report.findings:
        fault = known.get(finding.check)
        if fault is None or finding.severity != severity:
            continue
        stage = finding.stage or fault.stage
        found = Explanation(place, stage, told=_said(finding), warns=severity == "warning")
        found.hypotheses.append(named(fault, found.told))
        yield found


def unnamed_findings(
    report: CohortReport, place: Cohort, faults: Sequence[Fault], explained: Collection[str]
) -> Iterator[Explanation]:
    """What is wrong with a cohort by findings that are the name of no fault, each check once.

    Args:
        report: What a replay found of a cohort.
        place: Its coordinates.
        faults: The catalogue.
        explained: Checks of which more is known.
    """
    known = {one.id for one in faults} | {*explained}
    alike: dict[tuple[str, str], list[Finding]] = {}
    for one in report.findings:
        if one.severity == "error" and one.stage is not None and one.check not in known:
            alike.setdefault((one.stage, one.check), []).append(one)
    for (stage, check), found in alike.items():
        more = f", and {len(found) - 1} more like it" if len(found) > 1 else ""
        note = f"no known fault: {_said(found[0])}{more}"
        yield Explanation(place, stage, note=note, kind=frozenset([check]))


def unexplained_stage(report: CohortReport, place: Cohort, stage: str) -> Explanation:
    """A stage that diverged of which nothing else is known: its first divergences.

    Args:
        report: What a replay found of a cohort.
        place: The cohort of which the stage is.
        stage: The stage.
    """
    (result,) = [one for one in report.stages if one.stage == stage]
    said = [
        f"{one.field}{f' of {one.sample_id}' if one.sample_id else ''} is {_versus(one)}"
        for one in result.divergences[:_SHOWN]
    ]
    said += [result.message] if result.message else []
    note = f"no known fault: {'; '.join(said) or 'it diverged'}"
    differs = frozenset(f"differs: {one.field.partition('[')[0]}" for one in result.divergences)
    return Explanation(place, stage, note=note, kind=differs)


def _versus(one: Divergence) -> str:
    """What is recorded, and what was expected; what is no number on both sides is no agreement."""
    same = one.recorded == one.recomputed or math.isnan(one.recomputed)
    if math.isfinite(one.recorded) or not same:
        return f"{one.recorded:.6g}, expected {one.recomputed:.6g}"
    return f"{one.recorded:.6g}, expected a finite value"


def named(fault: Fault, sentence: str, values: int = 0) -> Hypothesis:
    """A fault of which nothing has to be recomputed to know that it is one."""
    return Hypothesis(
        (fault.id,),
        fault.name,
        sentence,
        fault.look,
        tuple(reported(fault.references)),
        {},
        values,
        values,
        0.0,
    )


def _said(finding: Finding) -> str:
    where = "" if finding.sample_id is None else finding.sample_id
    where += "" if finding.token is None else f" token {finding.token}"
    return f"{finding.message} (at {where})" if where else finding.message

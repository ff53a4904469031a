"""Explaining what contract checks found: the mistake that each finding is known as."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trajreplay.query import Cohort
from trajreplay.stages.explain.explanation import Explanation, Hypothesis
from trajreplay.stages.faults import Fault, reported
from trajreplay.stages.report import CohortReport, Finding


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

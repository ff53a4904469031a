"""Rollouts that were not selected, in the reports of the selected steps that consumed them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from trajreplay.query import CaptureSet, Cohort, source_rollouts
from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.stages.report import CohortReport, Finding, StageResult, StageVerdict

_WORST_FIRST: tuple[StageVerdict, ...] = (
    "diverged",
    "refused",
    "unverified",
    "precision",
    "pass",
)


def fold_sources(
    reports: list[CohortReport], captures: Iterable[CaptureSet], selected: Collection[Cohort]
) -> list[CohortReport]:
    """The reports of what is selected, each with what its rollouts say of stages it lacks.

    The first divergence of a step is looked for over the step and its rollouts together, and a
    step that is selected alone is reported alone.
    """
    by_cohort = {_cohort(report): report for report in reports}
    chosen = set(selected)
    for one in captures:
        report, folded = by_cohort[one.cohort], set[str]()
        for source in source_rollouts(one):
            if source not in chosen and source in by_cohort:
                _fold(report, by_cohort[source], folded)
    return [report for cohort, report in by_cohort.items() if cohort in chosen]


def _cohort(report: CohortReport) -> Cohort:
    return Cohort(report.run_id, report.attempt, report.rollout_id, report.step_id)


def _fold(step: CohortReport, rollout: CohortReport, folded: set[str]) -> None:
    """Put a rollout's stages in the place of those that the step does not declare, worst first."""
    where = f"rollout {rollout.rollout_id}"
    if rollout.refusal:
        message = f"{where}, which it consumed from, is refused: {rollout.refusal}"
        step.refusal = step.refusal or message
        step.findings.append(Finding("refused", "error", message))
        return
    own = {result.stage: result for result in step.stages}
    for result in rollout.stages:
        mine = own.get(result.stage)
        if result.verdict not in _WORST_FIRST:
            continue
        declared = mine is not None and mine.verdict != "not-declared"
        if mine and declared and not (result.stage in folded and _badness(result) > _badness(mine)):
            continue
        folded.add(result.stage)
        message = f"{where}: {result.message}" if result.message else where
        own[result.stage] = replace(result, message=message)
    step.stages = sorted(own.values(), key=lambda one: STAGE_NAMES.index(one.stage))
    step.findings += [
        replace(one, message=f"{where}: {one.message}")
        for one in rollout.findings
        if one.severity != "info"
    ]


def _badness(result: StageResult) -> tuple[int, bool]:
    """The worse verdict tells more, and of equal ones that which inherits something."""
    return -_WORST_FIRST.index(result.verdict), result.inherited

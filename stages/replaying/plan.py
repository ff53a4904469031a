"""From a selection to a report: closure, source rollouts, and what else to say about the choice."""

from __future__ import annotations

from collections.abc import Callable

from trajreplay.query import (
    Catalog,
    Cohort,
    Selected,
    Selection,
    also_consumed_by,
    close,
    read_columns,
    rows_named,
    select,
    source_rollouts,
)
from trajreplay.schema.contracts import V1_STAGES
from trajreplay.schema.errors import QueryError
from trajreplay.schema.policy import Comparison
from trajreplay.schema.tables import TABLES
from trajreplay.stages.plugins import Plugin
from trajreplay.stages.replaying.folding import fold_sources
from trajreplay.stages.replaying.judge import DEFAULT_MEMORY_BYTES, replay_tasks
from trajreplay.stages.replaying.loading import Task, chosen_rows
from trajreplay.stages.report import COMPARED, CohortReport, Finding, Report


def replay(
    catalog: Catalog,
    selection: Selection,
    *,
    require_stages: bool = False,
    reward: Plugin | None = None,
    comparison: Comparison | None = None,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Recompute the stages of what is selected; see `Lake.replay`.

    Raises:
        QueryError: The selection is wrong or selects nothing.
        DatasetError: An attempt record is damaged.
    """
    selected = select(catalog, selection)
    tasks, behind = _tasks(catalog, selected)
    if reward is not None:
        _check_scored([*tasks, *behind], selection.stages)
    reports = replay_tasks(
        catalog.store,
        selected.sets,
        [*tasks, *behind],
        stages=selection.stages,
        reward=reward,
        comparison=comparison,
        allow_partial=selection.allow_partial,
        memory_bytes=memory_bytes,
        progress=progress,
    )
    if behind:
        reports = fold_sources(reports, [task.captures for task in tasks], selected.cohorts)
    if selection.stages:
        reports = _answering(reports)
    if len(selected) < len(selected.sets):
        _note_other_consumers(selected, reports)
    report = Report(reports, comparison=comparison)
    if require_stages:
        _require(report, selection.stages or V1_STAGES)
    return report


def _tasks(catalog: Catalog, selected: Selected) -> tuple[list[Task], list[Task]]:
    """What is selected, closed; and what is not of the rollouts that its steps consumed from."""
    tasks: dict[Cohort, Task] = {}
    for one in selected:
        closure = close(catalog.store, one, selected.selection.closure)
        rows = None if closure.whole else closure.rows
        tasks[one.captures.cohort] = Task(one.captures, rows, closure.whole, closure.problems)
    behind: dict[Cohort, Task] = {}
    for task in tasks.values():
        for source in source_rollouts(task.captures):
            if source not in selected.sets or source in tasks:
                continue
            captures = selected.sets[source]
            if task.whole or source in behind or not captures.complete:
                behind[source] = Task(captures)  # several parts of it are wanted, or it is refused
                continue
            ids = _consumed(catalog, task, source)
            closure = close(catalog.store, rows_named(catalog.store, captures, ids))
            rows = None if closure.whole else closure.rows
            behind[source] = Task(captures, rows, closure.whole, closure.problems)
    return list(tasks.values()), list(behind.values())


def _check_scored(tasks: list[Task], stages: tuple[str, ...]) -> None:
    """Refuse a reward function that would never be called: its pass would say nothing."""
    name = "reward.raw"
    if stages and name not in stages:
        found = f"only {', '.join(stages)} are to be recomputed"
    elif any(
        (contract := entry.contracts.get(name)) and contract.capability == "recompute"
        for task in tasks
        for entry in task.captures.entries
    ):
        return
    else:
        found = "no selected capture declares that it can be recomputed"
    raise QueryError(
        f"a reward function was given for {name}, and {found}",
        hint=f"Declare {name} in Lake.capture(stages=[...]), or replay without the function.",
    )


def _consumed(catalog: Catalog, task: Task, source: Cohort) -> tuple[str, ...]:
    """The samples of a rollout among the rows of a task."""
    names = ("sample_id", "source_attempt", "source_rollout_id")
    place = (source.attempt, source.rollout_id)
    found: list[str] = []
    for entry in task.captures.owners:
        table = read_columns(catalog.store, entry, TABLES["steps"], names)
        rows = chosen_rows(table, task.rows, entry.key.rank)
        ids, *where = (column.to_pylist() for column in rows.columns)
        found += [name for name, *one in zip(ids, *where, strict=True) if tuple(one) == place]
    return tuple(found)


def _answering(reports: list[CohortReport]) -> list[CohortReport]:
    """Without the cohorts that declare none of the stages asked for, unless none would be left."""
    found = [
        report
        for report in reports
        if report.refusal or any(one.verdict != "not-declared" for one in report.stages)
    ]
    return found or reports


def _note_other_consumers(selected: Selected, reports: list[CohortReport]) -> None:
    others = also_consumed_by(selected.sets, selected.cohorts)
    for report in reports:
        cohort = Cohort(report.run_id, report.attempt, report.rollout_id, report.step_id)
        steps = ", ".join(f"{one.rollout_id}:{one.step_id}" for one in others.get(cohort, ()))
        if steps:
            message = f"also consumed by the steps {steps}, which are not selected"
            report.findings.append(Finding("also-consumed-by", "info", message))


def _require(report: Report, stages: tuple[str, ...]) -> None:
    """Make every stage that was not compared unverified."""
    for cohort in report.cohorts:
        for result in cohort.stages:
            if result.stage in stages and result.verdict not in (*COMPARED, "refused"):
                result.message = f"{result.verdict}: {result.message}".removesuffix(": ")
                result.verdict = "unverified"

"""Checks of captured routes, where a cohort has any."""

from __future__ import annotations

from trajreplay.query.experts import expert_columns, route_problems, routed_rows
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.store import Store
from trajreplay.schema.tables import ROUTES
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.report import CohortReport, Finding


def check_routes(store: Store, cohort: LoadedCohort) -> LoadedCohort | CohortReport:
    """Add what is wrong with the routes of a cohort to its findings.

    Args:
        store: The lake.
        cohort: The cohort; all samples of its captures are checked.

    Returns:
        The cohort, or its report where the routes are not those that were captured: refused.
    """
    report = cohort.report
    if "sample" not in cohort.stages:
        return cohort
    try:
        for entry in cohort.owners:
            if entry.file(ROUTES.name) is None:
                continue
            for one in route_problems(routed_rows(store, entry, expert_columns(entry))):
                report.findings.append(
                    Finding(
                        one.check,
                        one.severity,
                        one.message,
                        stage="sample",
                        sample_id=one.sample_id,
                        token=one.token,
                    )
                )
    except DatasetError as error:
        report.refusal = error.message
        report.findings.append(Finding("refused", "error", error.message))
        return report
    return cohort

"""The ledger of a rollout: what became of each sample that was generated, and if it adds up."""

from __future__ import annotations

from collections import defaultdict

from trajreplay.query.catalog import Cohort
from trajreplay.schema.errors import TrajReplayError, listed
from trajreplay.schema.events import BUFFERED, FATES, FILTERED, GENERATED, SCORED
from trajreplay.stages.cohort import LoadedCohort
from trajreplay.stages.report import Finding
from trajreplay.stages.sources import Sources

_CHECK = "ledger"


def check_ledger(cohort: LoadedCohort, sources: Sources) -> None:
    """Hold the samples of a rollout against the fates that were noted of them, if any were.

        generated = recorded + filtered + buffered

    A sample that was buffered before is generated in another rollout, so what is recorded may be
    more than that where something was buffered; nothing else may be.

    Args:
        cohort: A whole rollout.
        sources: Where events are looked up.
    """
    report = cohort.report
    place = Cohort(report.run_id, report.attempt, report.rollout_id, None)
    fates: dict[str, set[str]] = defaultdict(set)
    try:
        for rows in sources.events_of(place):
            columns = (rows[name].to_pylist() for name in ("event", "sample_id"))
            for fate, sample_id in zip(*columns, strict=True):
                if fate in FATES and sample_id is not None:
                    fates[fate].add(sample_id)
    except TrajReplayError as error:
        report.findings.append(Finding(_CHECK, "warning", f"it cannot be read: {error.message}"))
        return
    if not fates:
        return
    recorded = set(cohort.table["sample_id"].to_pylist())
    generated, filtered = fates[GENERATED], fates[FILTERED]
    problems = {"were filtered, and are among those recorded": filtered & recorded}
    if generated:
        left = generated - filtered - fates[BUFFERED] - recorded
        problems["were generated, and neither recorded nor filtered nor buffered"] = left
        problems["were scored or filtered, and not generated"] = (
            fates[SCORED] | filtered
        ) - generated
        if not fates[BUFFERED]:
            problems["are recorded, and were not generated"] = recorded - generated
    for what, samples in problems.items():
        if samples:
            message = f"{len(samples)} samples {what}: {listed(sorted(samples), 3)}"
            report.findings.append(Finding(_CHECK, "error", message, "sample"))

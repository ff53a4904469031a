"""The ledger of a rollout: what became of each sample that was generated, and if it adds up."""

from __future__ import annotations

from collections import defaultdict

from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.errors import TrajReplayError, listed
from trajreplay.schema.events import BUFFERED, FATES, FILTERED, GENERATED, SCORED
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.sources import Sources
from trajreplay.stages.report import CohortReport, Finding

_CHECK = "ledger"
_RESTART = "ledger.restart"


def check_ledger(cohort: LoadedCohort, sources: Sources) -> None:
    """Hold the samples of a rollout against the fates that were noted of them, if any were.

        generated = recorded + filtered + buffered

    A sample that was buffered in an earlier rollout was generated there, so what is recorded may be
    more than that by those, or where something is buffered; nothing else may be. The first rollout
    after a restart has samples of what was buffered before it, or says that they still are.

    Args:
        cohort: A whole rollout.
        sources: Where events are looked up.
    """
    report = cohort.report
    place = Cohort(report.run_id, report.attempt, report.rollout_id, None)
    last = next(sources.rollouts_before(place), None)
    last = None if last is None or last.attempt == place.attempt else last  # before a restart
    recorded = set(cohort.table["sample_id"].to_pylist())
    try:
        fates = _fates(sources, place)
        new = recorded - fates[GENERATED]
        if fates[GENERATED] and new and not fates[BUFFERED]:
            fates[GENERATED] |= _returned(sources, place, new)
        left = set() if last is None else _fates(sources, last)[BUFFERED]
    except TrajReplayError as error:
        report.findings.append(Finding(_CHECK, "warning", f"it cannot be read: {error.message}"))
        return
    if any(fates.values()):
        _add_up(report, fates, recorded)
    if last is not None and left and fates[GENERATED] & recorded:
        _check_restart(report, last, left, recorded | fates[BUFFERED] | fates[FILTERED])


def _returned(sources: Sources, place: Cohort, samples: set[str]) -> set[str]:
    """Those of some samples that were buffered in a rollout before."""
    found: set[str] = set()
    for earlier in sources.rollouts_before(place):
        found |= _fates(sources, earlier)[BUFFERED] & samples
        if found == samples:
            break
    return found


def _fates(sources: Sources, place: Cohort) -> dict[str, set[str]]:
    """The samples that had each fate in a rollout."""
    fates: dict[str, set[str]] = defaultdict(set)
    for rows in sources.events_of(place):
        columns = (rows[name].to_pylist() for name in ("event", "sample_id"))
        for fate, sample_id in zip(*columns, strict=True):
            if fate in FATES and sample_id is not None:
                fates[fate].add(sample_id)
    return fates


def _add_up(report: CohortReport, fates: dict[str, set[str]], recorded: set[str]) -> None:
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


def _check_restart(
    report: CohortReport, earlier: Cohort, left: set[str], accounted: set[str]
) -> None:
    """Warn of a buffer that a restart has emptied: new samples come before all that were in it."""
    if left & accounted:
        return
    message = (
        f"{len(left)} samples were buffered in rollout {earlier.rollout_id} of attempt "
        f"{earlier.attempt}, and the first rollout after the restart trains on new ones and has "
        f"none of them: {listed(sorted(left), 3)}"
    )
    report.findings.append(Finding(_RESTART, "warning", message, "sample"))

"""Explain: replay what is selected, and search what reproduces each divergence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trajreplay.query import Catalog, Cohort, Selection, select
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.counterfactuals.variants import COMPUTED
from trajreplay.stages.explain.explanation import Explanation
from trajreplay.stages.explain.findings import (
    explain_findings,
    unexplained_stage,
    unnamed_findings,
)
from trajreplay.stages.explain.handoffs import explain_handoffs
from trajreplay.stages.explain.non_finite import FirstNonFinite, first_non_finite
from trajreplay.stages.explain.raw_rewards import explain_raw_rewards
from trajreplay.stages.explain.rounding import Rounded, rounded_stages
from trajreplay.stages.explain.searches import Searches
from trajreplay.stages.faults import Fault, catalogue, not_loaded
from trajreplay.stages.replaying.batches import others_of_rollouts
from trajreplay.stages.replaying.judge import DEFAULT_MEMORY_BYTES, one_thread
from trajreplay.stages.replaying.plan import replay
from trajreplay.stages.replaying.whole import WholeCohorts, block_of
from trajreplay.stages.report import CohortReport, Report

_EXPLAINED = ("sample", "reward.raw", *COMPUTED)


@dataclass
class Explained:
    """A replay, and what explains its divergences.

    Args:
        report: The replay's report.
        explanations: By cohort: errors of contract checks, what diverged, their warnings.
        non_finite: Of diverged cohorts that hold NaN or infinities, where the first one entered.
        rounded: Stages that differ, and by no more than dtype and reduction order may explain.
        not_loaded: Why faults of installed packages were not tried at all.
        weights: The newest weights that sampled each cohort, of runs of which something is
            explained.
    """

    report: Report
    explanations: list[Explanation] = field(default_factory=list)
    non_finite: list[FirstNonFinite] = field(default_factory=list)
    rounded: list[Rounded] = field(default_factory=list)
    not_loaded: tuple[str, ...] = ()
    weights: dict[Cohort, int | None] = field(default_factory=dict)

    def of(self, cohort: CohortReport) -> list[Explanation]:
        """What is known of one cohort of the report."""
        place = _place(cohort)
        return [one for one in self.explanations if one.cohort == place]

    def to_json(self) -> dict[str, Any]:
        """The report, and the explanations beside its cohorts."""
        return {
            **self.report.to_json(),
            "explanations": [one.to_json() for one in self.explanations],
            "non_finite": [one.to_json() for one in self.non_finite],
            "rounded": [one.to_json() for one in self.rounded],
            "not_loaded": list(self.not_loaded),
        }


@one_thread()
def explain(
    catalog: Catalog,
    selection: Selection,
    *,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Explained:
    """Replay, and explain every stage that diverged on its own; see `Lake.explain`.

    Raises:
        QueryError: The selection is wrong or selects nothing.
    """
    faults = catalogue()
    report = replay(catalog, selection, memory_bytes=memory_bytes, progress=progress, **options)
    whole = WholeCohorts(catalog, select(catalog, selection), memory_bytes=memory_bytes)
    rounded = rounded_stages(report, whole.declaring, partial(_block, whole))
    explained = Explained(report, rounded=rounded, not_loaded=not_loaded())
    by_place = {_place(one): one for one in report.cohorts}
    explained.explanations += _findings(report, "error", faults)
    searches = Searches(faults)
    told = {(one.cohort, one.stage) for one in explained.explanations}
    handed: set[tuple[Cohort, str]] = set()
    for place, stages in _diverged(report, whole):
        loaded = _load(whole, place)
        if isinstance(loaded, LoadedCohort):
            odd = first_non_finite(loaded, place)
            explained.non_finite += [odd] if odd is not None else []
        for stage in stages:
            one = Explanation(place, stage)
            if stage == "sample":
                if isinstance(loaded, LoadedCohort) and place.step_id is not None:
                    for column, known in explain_handoffs(
                        loaded, by_place[place], whole.sources, place, faults
                    ):
                        handed.add((place, f"handoff.{column}"))
                        explained.explanations.append(known)
                continue
            if stage == "reward.raw":
                if isinstance(loaded, LoadedCohort):
                    block = block_of(loaded)
                    explained.explanations += explain_raw_rewards(block, place, faults)
                continue
            if isinstance(loaded, CohortReport):
                one.note = f"cannot be explained: {loaded.refusal or 'nothing can be recomputed'}"
            else:
                searches.explain(block_of(loaded), one)
                if not one.differ and one.of:
                    one.note = _of_no_numbers(by_place.get(place), stage) or one.note
                if not one.differ and not one.told and (place, stage) in told:
                    continue  # a check says why
            explained.explanations.append(one)
    searches.again(partial(_block, whole))
    explained.explanations += _rest(report, whole, faults, handed, explained.explanations)
    explained.explanations += _findings(report, "warning", faults)
    explained.explanations.sort(key=lambda one: one.cohort.order)
    _set_weights(explained, whole)
    return explained


def _of_no_numbers(report: CohortReport | None, stage: str) -> str:
    """Why a stage diverged of which every value equals its recomputation: NaN equals no number."""
    results = [] if report is None else [one for one in report.stages if one.stage == stage]
    odd = sum(one.non_finite for one in results)
    if not odd:
        return ""
    return (
        f"no known fault: {odd} values of trained tokens or samples that it reads or writes are "
        "not finite, and what is recomputed from the cohort's own columns is as it was recorded"
    )


def _set_weights(explained: Explained, whole: WholeCohorts) -> None:
    """Say which weights sampled the cohorts of explanations, and those beside them."""
    known = explained.weights
    for one in explained.explanations:
        if one.cohort not in known:
            known[one.cohort] = whole.newest_weights(one.cohort)
        one.weights = known[one.cohort]
    runs = {place.run_id for place, weights in known.items() if weights is not None}
    for place in map(_place, explained.report.cohorts):
        if place.run_id in runs and place not in known:
            known[place] = whole.newest_weights(place)


def _findings(report: Report, severity: str, faults: Sequence[Fault]) -> Iterator[Explanation]:
    for cohort in report.cohorts:
        yield from explain_findings(cohort, _place(cohort), severity, faults)


def _rest(
    report: Report,
    whole: WholeCohorts,
    faults: Sequence[Fault],
    handed: Set[tuple[Cohort, str]],
    known: Sequence[Explanation],
) -> list[Explanation]:
    """Of what diverged and nothing is known of, what a replay says of it."""
    found: list[Explanation] = []
    for cohort in report.cohorts:
        place = _place(cohort)
        checks = {check for one, check in handed if one == place}
        found += unnamed_findings(cohort, place, faults, checks)
    told = {(one.cohort, one.stage) for one in (*known, *found)}
    for cohort in report.cohorts:
        place = _place(cohort)
        for stage in (one.stage for one in cohort.stages if one.verdict == "diverged"):
            owners = [place, *whole.declaring(place, stage)]
            if not any((owner, stage) in told for owner in owners):
                found.append(unexplained_stage(cohort, owners[-1], stage))
                told.add((owners[-1], stage))
    return found


def _diverged(report: Report, whole: WholeCohorts) -> Iterator[tuple[Cohort, list[str]]]:
    """Cohorts and the stages of theirs that diverged, each once.

    What a step shows of a rollout that was not selected is the rollout's.
    """
    done: set[tuple[Cohort, str]] = set()
    for cohort in report.cohorts:
        place = _place(cohort)
        by_owner: dict[Cohort, list[str]] = {}
        for result in cohort.stages:
            if result.verdict != "diverged" or result.stage not in _EXPLAINED:
                continue
            for owner in whole.declaring(place, result.stage):
                if (owner, result.stage) not in done:
                    done.add((owner, result.stage))
                    by_owner.setdefault(owner, []).append(result.stage)
        yield from by_owner.items()


def _block(whole: WholeCohorts, place: Cohort) -> Block | None:
    loaded = _load(whole, place)
    return block_of(loaded) if isinstance(loaded, LoadedCohort) else None


def _load(whole: WholeCohorts, place: Cohort) -> LoadedCohort | CohortReport:
    """A cohort, what else its rollouts hold, and what was captured of it before.

    Statistics may have been of all samples of a rollout, and log-probs those of another time.
    """
    loaded = whole.load(place)
    if isinstance(loaded, LoadedCohort):
        loaded.earlier = whole.earlier(loaded)
        loaded.others = {**loaded.others, **others_of_rollouts(loaded, whole.sources)}
    return loaded


def _place(cohort: CohortReport) -> Cohort:
    return Cohort(cohort.run_id, cohort.attempt, cohort.rollout_id, cohort.step_id)

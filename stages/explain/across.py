"""Explanations over a run: those that are one, when each began, and where it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trajreplay.query import Cohort
from trajreplay.stages.explain.explanation import Explanation
from trajreplay.stages.explain.residual import without_own
from trajreplay.stages.explain.run import Explained
from trajreplay.stages.report import COMPARED, CohortReport


@dataclass(frozen=True)
class Cluster:
    """Divergences of one stage of one run with one explanation.

    Args:
        run_id: The run.
        stage: The stage.
        faults: Ids of the faults that explain them; empty where none does.
        sentence: What the recorded values equal, or the shape of the error, of the first cohort.
        known_as: Their names.
        cohorts: The cohorts, first to last.
        judged: Cohorts of the run of which the stage was compared.
        when: When it shows: always, once, since a rollout, an attempt, and at which ranks.
        example: The explanation of the first cohort in full.
        told: Whether a contract check found it, so that the sentence says what is wrong.
        warns: Whether it is only a warning, by which no stage diverged.
        doubt: What to say first where chance gives what all of them recorded; else nothing.
    """

    run_id: str
    stage: str
    faults: tuple[str, ...]
    sentence: str
    known_as: str
    cohorts: tuple[Cohort, ...]
    judged: int
    when: str
    example: str
    told: bool = False
    warns: bool = False
    doubt: str = ""

    @property
    def text(self) -> str:
        """The cluster in a line."""
        count = f"{len(self.cohorts)} of {self.judged} cohorts"
        start = f"{self.stage}: {count}, {self.when}:{' a warning:' if self.warns else ''}"
        if not self.faults:
            return f"{start} {self.sentence}."
        see = f"Known as: {self.known_as}. See: trajreplay faults {self.faults[0]}"
        equal = "" if self.told else self.doubt or "equal "
        return f"{start} {equal}{self.sentence}. {see}"

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        facts = dict(vars(self))
        facts["faults"] = list(self.faults)
        facts["cohorts"] = [one._asdict() for one in self.cohorts]
        return facts | {"text": self.text}


def clusters(explained: Explained) -> list[Cluster]:
    """Put explanations that are one together, by run and stage, those of most cohorts first.

    Args:
        explained: What `explain` found over several cohorts.
    """
    by_stage: dict[tuple[str, str, bool], list[Explanation]] = {}
    for one in explained.explanations:
        by_stage.setdefault((one.cohort.run_id, one.stage, one.warns), []).append(one)
    made = []
    for (run_id, stage, _), found in by_stage.items():
        named = [one for one in found if one.hypotheses]
        unnamed = [one for one in found if not one.hypotheses]
        sets = [*_by_fault(named), *(((), alike) for alike in _of_one_kind(unnamed))]
        made += [_cluster(explained, run_id, stage, faults, alike) for faults, alike in sets]
    return sorted(made, key=lambda one: (one.run_id, -len(one.cohorts), one.cohorts[0].order))


def _by_fault(named: Sequence[Explanation]) -> list[tuple[tuple[str, ...], list[Explanation]]]:
    """Explanations, those together that one fault gives: the fault that gives most comes first.

    What is the same on some cohorts, such as one batch and the whole of it, others tell apart.
    """
    left, found = list(named), []
    while left:
        gives: dict[tuple[str, ...], list[Explanation]] = {}
        for one in left:
            for faults in dict.fromkeys(each.faults for each in one.hypotheses):
                gives.setdefault(faults, []).append(one)
        # Of two that give as many, what is believed first of the first cohort.
        best = max(gives, key=lambda faults: len(gives[faults]))
        found.append((best, [_led_by(best, one) for one in gives[best]]))
        left = [one for one in left if all(one is not other for other in gives[best])]
    return found


def _led_by(faults: tuple[str, ...], one: Explanation) -> Explanation:
    """An explanation with the hypotheses of some faults before the others."""
    hypotheses = sorted(one.hypotheses, key=lambda each: each.faults != faults)
    return replace(one, hypotheses=hypotheses)


def _of_one_kind(unnamed: Sequence[Explanation]) -> list[list[Explanation]]:
    """Explanations that name no fault, those together that may be of one cause.

    An error in few values has no shape for certain, and may have that of the others all the same.
    """
    kinds = {_kind(one) for one in unnamed}
    left, found = list(unnamed), []
    while left:
        may_be = {
            kind: [one for one in left if _kind(one) <= kind <= _kind(one) | one.fits]
            for kind in kinds
        }
        # The kind of most, and of two the one that says more.
        best = max(may_be, key=lambda kind: (len(may_be[kind]), len(kind), sorted(kind)))
        found.append(may_be[best])
        left = [one for one in left if all(one is not other for other in may_be[best])]
    return found


def _kind(one: Explanation) -> frozenset[str]:
    """What tells explanations apart that name no fault: what differs, or else what is said."""
    return one.kind or frozenset([without_own(one.note)])


def _cluster(
    explained: Explained,
    run_id: str,
    stage: str,
    faults: tuple[str, ...],
    found: list[Explanation],
) -> Cluster:
    found = sorted(found, key=lambda one: one.cohort.order)
    first = found[0]
    diverged = {one.cohort for one in found}
    kinds = {one.step_id is None for one in diverged}  # a step may well be wrong and no rollout
    judged = [
        one
        for one in explained.report.cohorts
        if one.run_id == run_id
        and (one.step_id is None) in kinds
        and _is_judged(one, stage, diverged)
    ]
    failed = list(dict.fromkeys(said for one in found for said in one.failed))
    nothing = [first.nothing_known, *first.residual, *(f"not tried: {one}" for one in failed)]
    sentence = first.told or first.note or "; ".join(nothing)
    return Cluster(
        run_id,
        stage,
        faults,
        first.first.sentence if first.first and not first.told else sentence,
        first.first.known_as if first.first else "",
        tuple(dict.fromkeys(one.cohort for one in found)),
        max(len(judged), len(diverged)),
        _when(judged, diverged, found, stage, explained.weights),
        first.text,
        bool(first.told),
        first.warns,
        _doubt(found),
    )


def _doubt(found: Sequence[Explanation]) -> str:
    """The doubt of the first, where there is one about all of them."""
    said = [one.first.doubt for one in found if one.first is not None]
    return said[0] if said and all(said) else ""


def _is_judged(report: CohortReport, stage: str, diverged: set[Cohort]) -> bool:
    """Whether a stage of this cohort's own was compared; what is folded in is its rollout's."""
    own = [one for one in report.stages if one.stage == stage and one.verdict in COMPARED]
    folded = any(one.message.startswith("rollout ") for one in own)
    return _place(report) in diverged or (bool(own) and not folded)


def _place(report: CohortReport) -> Cohort:
    return Cohort(report.run_id, report.attempt, report.rollout_id, report.step_id)


def _when(
    judged: Sequence[CohortReport],
    diverged: set[Cohort],
    found: Sequence[Explanation],
    stage: str,
    weights: Mapping[Cohort, int | None],
) -> str:
    places = [_place(one) for one in judged]
    hit = [place in diverged for place in places]
    start = found[0].cohort
    where = f"rollout {start.rollout_id}"
    where += "" if start.step_id is None else f" step {start.step_id}"
    if all(hit) and len(hit) > 1:
        when = "always"
    elif len(diverged) == 1:
        when = f"once, at {where}"
    elif all(hit[hit.index(True) :]) if True in hit else False:
        restarted = start.attempt and all(
            place.attempt < start.attempt for place in places[: hit.index(True)]
        )
        when = f"since the restart as attempt {start.attempt}" if restarted else f"since {where}"
    elif (version := _since(places, diverged, weights)) is not None:
        when = f"since weight version {version}, first at {where}"
    else:
        when = f"now and then, first at {where}"
    versions = found[0].weights
    if versions is not None and when != "always" and "weight version" not in when:
        when += f" (weight version {versions})"
    results = [
        result
        for report in judged
        if _place(report) in diverged
        for result in report.stages
        if result.stage == stage
    ]
    if found[0].told:
        return when  # a check looks at a cohort as a whole
    ranks = {rank for result in results for rank in result.ranks}
    every = {rank for report in judged for rank in report.ranks}
    if ranks and len(ranks) < len(every):
        noun = "rank" if len(ranks) == 1 else "ranks"
        when += f", at {noun} {', '.join(map(str, sorted(ranks)))}"
    return when


def _since(
    places: Sequence[Cohort], diverged: set[Cohort], weights: Mapping[Cohort, int | None]
) -> int | None:
    """The weights from which on every cohort diverged, and none before; None of no such ones."""
    by_hit: tuple[list[int], list[int]] = ([], [])
    for place in places:
        version = weights.get(place)
        if version is None:
            return None
        by_hit[place in diverged].append(version)
    before, hit = by_hit
    return min(hit) if hit and before and max(before) < min(hit) else None

"""Differences that dtype and the order of sums may explain alone, and which of these does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trajreplay.query import Cohort
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.evaluated import Evaluated, evaluations
from trajreplay.stages.report import Report, json_float

# Cohorts of a stage that are recomputed in several dtypes: those that differ by most.
_TRIED = 4


@dataclass(frozen=True)
class Rounded:
    """A stage that differs by no more than its arithmetic rounds.

    Recorded and recomputed values are apart by more than the tolerance and less than the bound that
    is computed from the data: what the recorded dtype and float32 arithmetic may round, in
    whatever order sums are taken.

    Args:
        stage: The stage.
        cohorts: Those in which it does.
        max_error: The largest difference.
        evaluated: What it is in several dtypes and orders of sums, those first that have most of
            the recorded bits; empty where none can be had.
        tried: The cohorts that those are of.
    """

    stage: str
    cohorts: tuple[Cohort, ...]
    max_error: float
    evaluated: tuple[Evaluated, ...] = ()
    tried: tuple[Cohort, ...] = ()

    @property
    def text(self) -> str:
        """The difference and its reason in a sentence."""
        count = len(self.cohorts)
        verb = f"{count} cohort{'' if count == 1 else 's'} differ{'s' if count == 1 else ''}"
        return (
            f"{self.stage}: {verb} by up to {self.max_error:.3g}, within the bound of their "
            f"rounding: {self._reason}"
        )

    @property
    def _reason(self) -> str:
        """Which arithmetic has the recorded bits, as far as one was found."""
        if not self.evaluated:
            return "dtype or reduction order may explain it alone"
        left = len(self.cohorts) - len(self.tried)
        where = f" (in the {len(self.tried)} cohorts that differ by most)" if left else ""
        best = self.evaluated[0]
        if best.same == best.values:
            alike = [one.arithmetic for one in self.evaluated if one.same == one.values]
            also = f", and so does {'; '.join(alike[1:])}" if alike[1:] else ""
            return (
                f"{best.arithmetic} gives all {best.values} values bit for bit{where}{also}: "
                "dtype and reduction order explain it alone"
            )
        names = "; ".join(one.arithmetic for one in self.evaluated)
        return (
            f"none of {names} gives all of it{where}; {best.arithmetic} gives {best.same} of "
            f"{best.values} values bit for bit and the others within {best.max_error:.3g}: another "
            "order of operations may explain it alone"
        )

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            "stage": self.stage,
            "cohorts": [one._asdict() for one in self.cohorts],
            "max_error": json_float(self.max_error),
            "evaluated": [
                {**vars(one), "max_error": json_float(one.max_error)} for one in self.evaluated
            ],
            "tried": [one._asdict() for one in self.tried],
            "text": self.text,
        }


def rounded_stages(
    report: Report,
    owners: Callable[[Cohort, str], Sequence[Cohort]],
    load: Callable[[Cohort], Block | None],
) -> list[Rounded]:
    """The stages of a replay that are precision, each with the cohorts in which it is.

    Args:
        report: A replay by the policy's own tolerances; others accept what no rounding explains.
        owners: The cohorts whose stage it is that a cohort shows: its own, or its rollouts'.
        load: Gives a cohort whole, if it can be had.
    """
    found: dict[str, list[tuple[Cohort, float]]] = defaultdict(list)
    for one in report.cohorts:
        place = Cohort(one.run_id, one.attempt, one.rollout_id, one.step_id)
        for result in one.stages:
            if result.verdict == "precision":
                found[result.stage].append((place, result.max_abs_error or 0.0))
    rounded = [
        Rounded(stage, tuple(place for place, _ in pairs), max(error for _, error in pairs))
        for stage, pairs in found.items()
    ]
    tried: dict[Cohort, list[str]] = {}
    for stage, pairs in found.items():
        most = sorted(pairs, key=lambda pair: -pair[1])[:_TRIED]
        for place in dict.fromkeys(each for one, _ in most for each in owners(one, stage)):
            tried.setdefault(place, []).append(stage)
    by_stage: dict[str, list[tuple[Cohort, list[Evaluated]]]] = defaultdict(list)
    for place, stages in tried.items():
        block = load(place)
        for stage in stages if block is not None else ():
            if block is not None and stage in block.cohorts[0].abilities:
                by_stage[stage].append((place, evaluations(block, stage)))
    return [_with_evaluations(one, by_stage[one.stage]) for one in rounded]


def _with_evaluations(
    rounded: Rounded, found: Sequence[tuple[Cohort, Sequence[Evaluated]]]
) -> Rounded:
    """What was found of each cohort, added up: of arithmetics that can be had of all."""
    sums: dict[str, list[Evaluated]] = defaultdict(list)
    for _, each in found:
        for one in each:
            sums[one.arithmetic].append(one)
    joined = []
    for parts in sums.values():
        if len(parts) == len(found):
            whole = parts[0]
            for part in parts[1:]:
                whole = whole.with_(part)
            joined.append(whole)
    joined.sort(key=lambda one: (-one.same, one.max_error))
    places = tuple(place for place, _ in found) if joined else ()
    return replace(rounded, evaluated=tuple(joined), tried=places)

"""Differences that dtype and the order of sums may explain alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from trajreplay.query import Cohort
from trajreplay.stages.report import Report, json_float


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
    """

    stage: str
    cohorts: tuple[Cohort, ...]
    max_error: float

    @property
    def text(self) -> str:
        """The difference and its reason in a sentence."""
        count = len(self.cohorts)
        verb = f"{count} cohort{'' if count == 1 else 's'} differ{'s' if count == 1 else ''}"
        return (
            f"{self.stage}: {verb} by up to {self.max_error:.3g}, within the bound of their "
            "rounding: dtype or reduction order may explain it alone"
        )

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            "stage": self.stage,
            "cohorts": [one._asdict() for one in self.cohorts],
            "max_error": json_float(self.max_error),
            "text": self.text,
        }


def rounded_stages(report: Report) -> list[Rounded]:
    """The stages of a replay that are precision, each with the cohorts in which it is.

    Args:
        report: A replay by the policy's own tolerances; others accept what no rounding explains.
    """
    found: dict[str, list[tuple[Cohort, float]]] = defaultdict(list)
    for one in report.cohorts:
        place = Cohort(one.run_id, one.attempt, one.rollout_id, one.step_id)
        for result in one.stages:
            if result.verdict == "precision":
                found[result.stage].append((place, result.max_abs_error or 0.0))
    return [
        Rounded(stage, tuple(place for place, _ in pairs), max(error for _, error in pairs))
        for stage, pairs in found.items()
    ]

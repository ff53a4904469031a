"""What a replay found: divergences, findings, stages, cohorts, and the verdict over all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from trajreplay.schema.contracts import CONTRACT_VERSION, STAGE_NAMES
from trajreplay.schema.policy import Comparison

Verdict = Literal["pass", "precision", "diverged", "unverified", "refused"]
StageVerdict = Literal[
    "pass",
    "precision",
    "diverged",
    "unverified",
    "refused",
    "recorded-only",
    "inspect-only",
    "not-declared",
    "unsupported",
    "skipped",
]
Severity = Literal["error", "warning", "info"]

FORMAT = 1
_WORST_FIRST: tuple[Verdict, ...] = ("diverged", "refused", "unverified", "precision", "pass")
COMPARED: tuple[StageVerdict, ...] = ("pass", "precision", "diverged")


@dataclass(frozen=True)
class Divergence:
    """One value that differs: where it is, what was recorded, what was recomputed.

    `token` is the position in the response; `ratio` is recorded / recomputed.
    """

    field: str
    recorded: float
    recomputed: float
    sample_id: str | None = None
    group_id: str | None = None
    rank: int | None = None
    token: int | None = None

    @property
    def abs_error(self) -> float:
        """|recorded - recomputed|."""
        return abs(self.recorded - self.recomputed)

    @property
    def ratio(self) -> float | None:
        """The quotient recorded / recomputed, None where that is not finite."""
        if not self.recomputed:
            return None
        ratio = self.recorded / self.recomputed
        return ratio if math.isfinite(ratio) else None

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            "field": self.field,
            "sample_id": self.sample_id,
            "group_id": self.group_id,
            "rank": self.rank,
            "token": self.token,
            "recorded": json_float(self.recorded),
            "recomputed": json_float(self.recomputed),
            "abs_error": json_float(self.abs_error),
            "ratio": self.ratio,
        }


@dataclass(frozen=True)
class Finding:
    """Something worth saying about a cohort; of severity error it makes its stage diverge."""

    check: str
    severity: Severity
    message: str
    stage: str | None = None
    sample_id: str | None = None
    token: int | None = None

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            "check": self.check,
            "severity": self.severity,
            "stage": self.stage,
            "sample_id": self.sample_id,
            "token": self.token,
            "message": self.message,
        }


@dataclass
class StageResult:
    """What became of one stage of one cohort.

    Args:
        stage: Name of the stage.
        verdict: pass, precision, diverged, unverified, refused, or why it was not run.
        isolated: Verdict from the inputs recorded in the capture.
        chained: Verdict from recomputed inputs; None for a stage that reads none.
        inherited: Agrees with its own inputs and differs when chained.
        suspect: "recorded-intermediate" where a recorded value is not the one that was consumed.
        max_abs_error: Largest |recorded - recomputed| of the isolated look.
        chained_error: The same of the chained look.
        mismatches: Values, or samples for a stage of samples, beyond every bound.
        compared: Values that were compared.
        non_finite: NaN and infinite values on trainable tokens.
        divergences: The first values that differ.
        ranks: The ranks of all that differ, as far as they are of some.
    """

    stage: str
    verdict: StageVerdict
    capability: str = "recompute"
    version: str = CONTRACT_VERSION
    isolated: StageVerdict | None = None
    chained: StageVerdict | None = None
    inherited: bool = False
    suspect: str | None = None
    message: str = ""
    max_abs_error: float | None = None
    chained_error: float | None = None
    mismatches: int = 0
    compared: int = 0
    non_finite: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            "stage": self.stage,
            "version": self.version,
            "capability": self.capability,
            "verdict": self.verdict,
            "isolated": self.isolated,
            "chained": self.chained,
            "inherited": self.inherited,
            "suspect": self.suspect,
            "message": self.message,
            "max_abs_error": json_float(self.max_abs_error),
            "chained_error": json_float(self.chained_error),
            "mismatches": self.mismatches,
            "compared": self.compared,
            "non_finite": self.non_finite,
            "ranks": self.ranks,
            "divergences": [one.to_json() for one in self.divergences],
        }


@dataclass
class CohortReport:
    """The verdict on one cohort: the samples of one rollout, or of one optimizer step."""

    run_id: str
    attempt: int
    rollout_id: int
    step_id: int | None
    ranks: list[int]
    stages: list[StageResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    refusal: str = ""
    partial: bool = False
    unproven: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst of its stages; unverified when nothing was compared or ranks may be missing."""
        found: list[Verdict] = [one.verdict for one in self.stages if one.verdict in _WORST_FIRST]
        if self.refusal:
            found.append("refused")
        doubtful = self.partial or self.unproven
        if doubtful or not any(one.verdict in COMPARED for one in self.stages):
            found.append("unverified")
        return _worst(found)

    @property
    def first_divergent_stage(self) -> str | None:
        """The earliest stage that diverged on its own."""
        diverged = {one.stage for one in self.stages if one.verdict == "diverged"}
        return next((stage for stage in STAGE_NAMES if stage in diverged), None)

    @property
    def place(self) -> tuple[str, int, int, int]:
        """Where it stands in the order of a report."""
        step = -1 if self.step_id is None else self.step_id
        return self.run_id, self.rollout_id, step, self.attempt

    @property
    def rollout(self) -> tuple[str, int, int]:
        """The rollout that it is, or belongs to."""
        return self.run_id, self.attempt, self.rollout_id

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            "run_id": self.run_id,
            "attempt": self.attempt,
            "rollout_id": self.rollout_id,
            "step_id": self.step_id,
            "ranks": self.ranks,
            "verdict": self.verdict,
            "first_divergent_stage": self.first_divergent_stage,
            "findings": [one.to_json() for one in self.findings],
            "stages": [one.to_json() for one in self.stages],
        }


@dataclass
class Report:
    """The verdict of a replay over all its cohorts, in (run, rollout, step) order.

    Args:
        cohorts: Those that were replayed.
        refused: Files that no cohort could be read from, by path, and why.
        comparison: How to compare, where that was asked for.
    """

    cohorts: list[CohortReport]
    refused: dict[str, str] = field(default_factory=dict)
    comparison: Comparison | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of its cohorts; unverified when there is none."""
        found = [one.verdict for one in self.cohorts]
        if self.refused:
            found.append("refused")
        return _worst(found or ["unverified"])

    @property
    def first_divergent_stage(self) -> str | None:
        """That of the first diverged cohort; of a rollout and its first such step the earlier."""
        diverged = [cohort for cohort in self.cohorts if cohort.verdict == "diverged"]
        if not diverged:
            return None
        first = [diverged[0]]
        if diverged[0].step_id is None:
            steps = (one for one in diverged[1:] if one.rollout == diverged[0].rollout)
            first += itertools.islice(steps, 1)
        found = [one.first_divergent_stage for one in first if one.first_divergent_stage]
        return min(found, key=STAGE_NAMES.index, default=None)

    @property
    def exit_code(self) -> int:
        """1 if any cohort diverged, else 3 if any was refused or unverified, else 0."""
        return {"diverged": 1, "refused": 3, "unverified": 3}.get(self.verdict, 0)

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {
            "format": FORMAT,
            "verdict": self.verdict,
            "first_divergent_stage": self.first_divergent_stage,
            "cohorts": [one.to_json() for one in self.cohorts],
            **({"refused": self.refused} if self.refused else {}),
            **({"comparison": self.comparison.to_json()} if self.comparison else {}),
        }


def _worst(found: Iterable[Verdict]) -> Verdict:
    return min(found, key=_WORST_FIRST.index)


def json_float(value: float | None) -> float | str | None:
    """A float as JSON has it: non-finite ones as "NaN", "Infinity", "-Infinity"."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"

"""Small trainings of a known shape, and how to read what a replay says of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.helpers.cohorts import (
    ALL_STAGES,
    ROLLOUT_COLUMNS,
    ROLLOUT_STAGES,
    STEP_COLUMNS,
    STEP_STAGES,
    Shares,
    capture,
    rank_sums,
)
from tests.helpers.trainer import Arithmetic, Sample, Trainer
from trajreplay import Lake
from trajreplay.schema import CaptureKey, Entry
from trajreplay.stages import CohortReport, Report, StageResult

LENGTHS = (3, 1, 4, 2, 5, 3, 2, 6)
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.0, 1.0, 1.0, 0.75)
WAY = Arithmetic(group_size=4)


def drawn(
    way: Arithmetic = WAY, *, rollout_id: int = 0, seed: int = 0, masked: bool = True
) -> list[Sample]:
    """Eight samples in two groups of four, scored and estimated; some tokens are masked."""
    numbers = np.random.default_rng(seed + 97 * rollout_id)
    samples = []
    for row, length in enumerate(LENGTHS):
        mask = [0 if masked and (row + token) % 4 == 3 else 1 for token in range(length)]
        one = Sample(f"s-{row}", f"g-{row // 4}", mask, REWARDS[row] + 0.125 * rollout_id)
        one.rollout_id = rollout_id
        base = numbers.normal(-1.0, 0.5, length)
        for name, spread in (
            ("rollout_log_probs", 0.01),
            ("old_log_probs", 0.05),
            ("ref_log_probs", 0.3),
            ("log_probs", 0.3),
        ):
            drift = base + numbers.normal(0.0, spread, length)
            one.columns[name] = torch.tensor(np.minimum(drift, -1e-3), dtype=torch.float32)
        one.columns["entropy"] = torch.tensor(numbers.random(length) + 0.5, dtype=torch.float32)
        one.micro_batch_id = f"mb-{row % 4 // 2:04d}"
        samples.append(one)
    trainer = Trainer(way)
    trainer.score(samples)
    trainer.estimate(samples)
    return samples


def halves(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    """Samples over two ranks, each group on both."""
    return {0: list(samples[::2]), 1: list(samples[1::2])}


def write_whole(
    lake: Lake,
    samples: Sequence[Sample] | Shares,
    way: Arithmetic = WAY,
    *,
    step_id: int = 0,
    **options: Any,
) -> list[Entry]:
    """All six stages in one step, over two ranks unless the shares say otherwise."""
    shares = samples if isinstance(samples, dict) else halves(list(samples))  # type: ignore[arg-type]
    if "expected" not in options:
        options["expected"] = rank_sums(Trainer(way), shares)
    options.setdefault("stages", ALL_STAGES)
    return capture(lake, shares, way, step_id=step_id, **options)


def write_rollout(
    lake: Lake, samples: Sequence[Sample] | Shares, way: Arithmetic = WAY, **options: Any
) -> list[Entry]:
    """A rollout and its five stages."""
    shares = samples if isinstance(samples, dict) else halves(list(samples))  # type: ignore[arg-type]
    options.setdefault("rollout_id", next(one for own in shares.values() for one in own).rollout_id)
    options.setdefault("stages", ROLLOUT_STAGES)
    options.setdefault("columns", ROLLOUT_COLUMNS)
    return capture(lake, shares, way, **options)


def write_step(
    lake: Lake,
    samples: Sequence[Sample] | Shares,
    way: Arithmetic = WAY,
    *,
    step_id: int = 0,
    **options: Any,
) -> list[Entry]:
    """A step that consumed samples, and its loss."""
    shares = samples if isinstance(samples, dict) else halves(list(samples))  # type: ignore[arg-type]
    if "expected" not in options:
        options["expected"] = rank_sums(Trainer(way), shares)
    options.setdefault("stages", STEP_STAGES)
    options.setdefault("columns", STEP_COLUMNS)
    return capture(lake, shares, way, step_id=step_id, **options)


def step_key(rank: int = 0, step_id: int = 0, rollout_id: int = 0) -> CaptureKey:
    """The key of a step's capture."""
    return CaptureKey("r", 0, "step", rollout_id, step_id, rank)


def rollout_key(rank: int = 0, rollout_id: int = 0) -> CaptureKey:
    """The key of a rollout's capture."""
    return CaptureKey("r", 0, "rollout", rollout_id, None, rank)


def the_cohort(report: Report, rollout_id: int = 0, step_id: int | None = 0) -> CohortReport:
    """The report of one cohort."""
    (found,) = (
        one for one in report.cohorts if (one.rollout_id, one.step_id) == (rollout_id, step_id)
    )
    return found


def the_stage(cohort: CohortReport | Report, stage: str) -> StageResult:
    """What became of one stage of a cohort, or of the only cohort of a report."""
    if isinstance(cohort, Report):
        (cohort,) = cohort.cohorts
    (found,) = (one for one in cohort.stages if one.stage == stage)
    return found


def refusals(cohort: CohortReport | Report) -> str:
    """Why a cohort, or which of its stages and why, are refused."""
    if isinstance(cohort, Report):
        (cohort,) = cohort.cohorts
    stages = [f"{one.stage}: {one.message}" for one in cohort.stages if one.verdict == "refused"]
    return "\n".join([cohort.refusal, *stages]).strip()


def verdicts(cohort: CohortReport | Report) -> dict[str, str]:
    """The verdict of each stage that was declared."""
    if isinstance(cohort, Report):
        (cohort,) = cohort.cohorts
    return {one.stage: one.verdict for one in cohort.stages if one.verdict != "not-declared"}


def diverged(cohort: CohortReport | Report) -> list[str]:
    """The stages that diverged."""
    return [stage for stage, verdict in verdicts(cohort).items() if verdict == "diverged"]


def places(result: StageResult) -> set[tuple[str, str | None, int | None]]:
    """Field, sample and token of every divergence."""
    return {(one.field, one.sample_id, one.token) for one in result.divergences}

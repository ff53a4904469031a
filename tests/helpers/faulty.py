"""Cohorts with a fault put in: what a variant recomputes becomes what was recorded."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.helpers.healthy_composed import Draw, loaded, trained
from trajreplay.query import Cohort
from trajreplay.schema import TrajReplayError
from trajreplay.stages.block import Block
from trajreplay.stages.explain.explanation import Explanation
from trajreplay.stages.explain.search import explain_stage
from trajreplay.stages.faults import Fault, Told
from trajreplay.stages.outputs import recorded_outputs
from trajreplay.stages.values import Values, recompute
from trajreplay.stages.variants import COMPUTED, Variant, varied

PLACE = Cohort("r", 0, 0, 0)


def blocks(folder: Path, draw: Draw, profile: str | None, count: int) -> Iterator[Block]:
    """Healthy cohorts of one drawn settings, each by itself."""
    settings = draw.settings(profile)
    drawn = []
    for _ in range(count):
        shares = draw.shares(settings)
        drawn.append((shares, trained(settings, shares)))
    for cohort in loaded(folder, settings, drawn, draw.stages):
        cohort.drop_incomplete()
        yield Block([cohort])


def with_fault(block: Block, stage: str, told: Told) -> Block | None:
    """The cohort as it would have been recorded with the fault; None where that changes nothing."""
    try:
        right = recompute(varied(block, Variant(), (stage,)), stage)
        wrong = recompute(varied(block, told.variant, (stage,)), stage)
    except (TrajReplayError, KeyError, RuntimeError):
        return None
    by_field = {one.field: one for one in wrong}
    if any(one.field not in by_field for one in right):
        return None
    made = _recorded(block, stage, [by_field[one.field] for one in right])
    after = recompute(varied(made, Variant(), (stage,)), stage)
    differs = any(bool((one.disagree & one.counts).any()) for one in after)
    return made if differs and all(_is_finite(one) for one in after) else None


def _is_finite(one: Values) -> bool:
    return bool(torch.isfinite(one.recorded[one.counts]).all())


def _recorded(block: Block, stage: str, values: Sequence[Values]) -> Block:
    made = copy.copy(block)
    if not stage.startswith("loss."):
        columns = {one.field: _float32(one.recomputed) for one in values}
        made.packed = block.packed.replaced(columns)
        return made
    left = {one.field: iter(one.recomputed.tolist()) for one in values}
    new: dict[int, dict[str, float]] = defaultdict(dict)
    for one in recorded_outputs(block, 0, stage):
        if one.output.field in left:
            new[one.entry.key.rank][one.output.field] = next(left[one.output.field])
    (cohort,) = block.cohorts
    cohort = copy.copy(cohort)
    cohort.owners = [
        replace(
            entry,
            outputs=tuple(
                replace(one, value=float(np.float32(new[entry.key.rank][one.field])))
                if one.stage == stage and one.field in new[entry.key.rank]
                else one
                for one in entry.outputs
            ),
        )
        for entry in cohort.owners
    ]
    made.cohorts = [cohort]
    return made


def _float32(values: Tensor) -> Tensor:
    return values.float().double()


def explained(block: Block, stage: str, faults: Sequence[Fault]) -> Explanation:
    """What is known of one stage of a cohort."""
    found = Explanation(PLACE, stage)
    explain_stage(block, stage, found, faults)
    return found


def stages_of(faults: Sequence[Fault]) -> list[str]:
    """The stages at which faults with variants show."""
    return [stage for stage in COMPUTED if any(one.stage == stage and one.tries for one in faults)]

"""Cohorts with a fault put in: what a variant recomputes becomes what was recorded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.helpers.healthy_composed import Draw, loaded, trained
from tests.helpers.trainer import Sample
from trajreplay.query import Cohort
from trajreplay.schema import Settings, TrajReplayError
from trajreplay.schema.entry import Output
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.sparing import Values
from trajreplay.stages.counterfactuals.values import recompute
from trajreplay.stages.counterfactuals.variants import Variant, varied
from trajreplay.stages.explain.explanation import Explanation
from trajreplay.stages.explain.search import explain_stage
from trajreplay.stages.faults import Fault, Told
from trajreplay.stages.outputs import Recorded, recorded_outputs

PLACE = Cohort("r", 0, 0, 0)
Shares = dict[int, list[Sample]]
Alter = Callable[[Draw, Settings, Shares], None]


def block_of(
    folder: Path,
    draw: Draw,
    settings: Settings,
    alter: Alter | None = None,
    groups: tuple[int, int] = (1, 3),
) -> Block:
    """A healthy cohort of drawn settings.

    Args:
        folder: Where its lake is written.
        draw: Draws its samples.
        settings: What they are trained under.
        alter: What is done to its samples before they are trained on.
        groups: How few and how many groups it has.
    """
    shares = draw.shares(settings, groups)
    if alter is not None:
        alter(draw, settings, shares)
        shares = {rank: own for rank, own in shares.items() if own}
    (cohort,) = loaded(folder, settings, [(shares, trained(settings, shares))], draw.stages)
    cohort.drop_incomplete()
    return Block([cohort])


def with_fault(block: Block, stage: str, told: Told, *, finite: bool = True) -> Block | None:
    """The cohort as it would have been recorded with the fault; None where that changes nothing.

    Args:
        block: The healthy cohort.
        stage: The stage.
        told: The fault.
        finite: Whether a cohort in which NaN is recorded is none.
    """
    try:
        right = recompute(varied(block, Variant(), (stage,)), stage)
        wrong = recompute(varied(block, told.variant, (stage,)), stage)
    except (TrajReplayError, KeyError, RuntimeError):
        return None
    by_field = {one.field: one for one in wrong}
    if any(one.field not in by_field for one in right):
        return None
    made = recorded_as(block, stage, [by_field[one.field] for one in right])
    return made if differs(made, stage, finite=finite) else None


def differs(block: Block, stage: str, *, finite: bool = True) -> bool:
    """Whether a stage of a cohort is not what its settings give, beyond every bound."""
    after = recompute(varied(block, Variant(), (stage,)), stage)
    if finite and not all(bool(torch.isfinite(one.recorded[one.counts]).all()) for one in after):
        return False
    return any(one.differs for one in after)


def recorded_as(block: Block, stage: str, values: Sequence[Values]) -> Block:
    """The cohort with other recorded values of a stage."""
    if not stage.startswith("loss."):
        return with_columns(block, {one.field: one.recomputed for one in values})
    left = {one.field: iter(one.recomputed.tolist()) for one in values}

    def change(one: Recorded) -> float | None:
        return next(left[one.output.field]) if one.output.field in left else None

    return with_outputs(block, stage, change)


def with_columns(block: Block, columns: dict[str, Tensor]) -> Block:
    """The cohort with other recorded columns, as float32 holds them."""
    made = copy.copy(block)
    made.packed = block.packed.replaced(
        {name: one.float().double() for name, one in columns.items()}
    )
    return made


def with_outputs(block: Block, stage: str, change: Callable[[Recorded], float | None]) -> Block:
    """The cohort with other recorded scalars of a stage.

    Args:
        block: The cohort.
        stage: The stage.
        change: The value that is recorded instead; None leaves one as it is.
    """
    new: dict[tuple[int, int], Output] = {}
    for one in recorded_outputs(block, 0, stage):
        value = change(one)
        if value is not None:
            place = one.entry.key.rank, id(one.output)
            new[place] = replace(one.output, value=float(np.float32(value)))
    made = copy.copy(block)
    (cohort,) = block.cohorts
    cohort = copy.copy(cohort)
    cohort.owners = [
        replace(
            entry,
            outputs=tuple(new.get((entry.key.rank, id(one)), one) for one in entry.outputs),
        )
        for entry in cohort.owners
    ]
    made.cohorts = [cohort]
    return made


def explained(block: Block, stage: str, faults: Sequence[Fault]) -> Explanation:
    """What is known of one stage of a cohort."""
    found = Explanation(PLACE, stage)
    explain_stage(block, stage, found, faults)
    assert not found.failed, found.failed
    return found

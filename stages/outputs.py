"""Recorded outputs: which samples a scalar covers, and what its declared meaning makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trajreplay.schema.entry import Entry, Output
from trajreplay.schema.policy import Tolerance
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.compare import Look, compare_elements


@dataclass(frozen=True)
class Recorded:
    """One recorded output of a stage of a cohort, and the packed samples that it covers.

    Args:
        output: The output.
        entry: The capture that holds it.
        samples: (K,) int64. Packed sample numbers.
        complete: Whether those are all the samples that it was computed from.
    """

    output: Output
    entry: Entry
    samples: Tensor
    complete: bool


def recorded_outputs(block: Block, index: int, stage: str) -> list[Recorded]:
    """The outputs of a stage that the captures of one cohort hold, with the samples of each.

    Outputs over the same samples share the tensor that names these.
    """
    cohort = block.cohorts[index]
    there = [
        (entry, outputs)
        for entry in cohort.owners
        if (outputs := [one for one in entry.outputs if one.stage == stage])
    ]
    if not there:
        return []
    first, stop = block.packed.sample_bounds[index : index + 2]
    every = torch.arange(first, stop)
    ranks = block.packed.ranks[first:stop]
    found: list[Recorded] = []
    for entry, outputs in there:
        mine = (ranks == entry.key.rank).nonzero()[0]
        own = torch.from_numpy(mine + first)
        for output in outputs:
            covered, complete = own, len(mine) == cohort.rows[entry.key.rank]
            if output.scope == "global":
                covered, complete = every, cohort.whole and not cohort.report.partial
            elif output.scope == "rank":
                complete = cohort.whole
            elif output.scope == "micro_batch":
                rows, complete = _micro_batch(cohort, entry, output, mine)
                covered = torch.from_numpy(rows + first)
            elif output.scope == "sample":
                complete = True
            found.append(Recorded(output, entry, covered, complete))
    return found


def _micro_batch(
    cohort: LoadedCohort, entry: Entry, output: Output, mine: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], bool]:
    names = cohort.micro_batch_names
    covered = mine[names[mine] == output.micro_batch_id]
    held = cohort.micro_batches.get((entry.key.rank, output.micro_batch_id), 0)
    return covered, len(covered) == held


def is_stated(output: Output) -> bool:
    """Whether a scalar says what it was taken over, and how; one that does not is only shown.

    A factor or divisor that is no positive number would make any value agree.
    """
    factors = [output.scale, *([] if output.denominator is None else [output.denominator])]
    lacking = output.reduction == "weighted-mean" and None in (output.numerator, output.denominator)
    usable = all(math.isfinite(one) and one > 0 for one in factors) and not lacking
    return output.scope is not None and output.reduction is not None and usable


def echoed_looks(
    block: Block,
    stage: str,
    column: str,
    fields: tuple[str, ...],
    tolerance: Tolerance,
    recomputed: Tensor | None = None,
    slack: Callable[[Tensor], Tensor] | None = None,
    exact: Tensor | None = None,
) -> list[Look]:
    """Hold values recorded per sample beside a column against what that column should be.

    Args:
        block: The cohorts.
        stage: The stage of the outputs.
        column: The column.
        fields: Names that the outputs go by.
        tolerance: What is a pass.
        recomputed: (S,) float64. What the column should be; what it is if omitted.
        slack: Gives, for some samples, the bound inside which a difference is precision.
        exact: (S,) float64. The bits that a pass must have; None where any will do.
    """
    target = block.packed.scalars(column) if recomputed is None else recomputed
    looks = [Look() for _ in block.cohorts]
    for index in range(len(block.cohorts)):
        for one in recorded_outputs(block, index, stage):
            if one.output.field not in fields or one.output.values is None:
                continue
            values = sample_values(block, one)
            compared = compare_elements(
                values,
                target[one.samples],
                [0, len(values)],
                tolerance,
                slack=lambda outside, one=one: (  # type: ignore[misc]
                    torch.zeros(len(outside)).double()
                    if slack is None
                    else slack(one.samples[outside])
                ),
                describe=lambda at, old, new, one=one: block.sample_divergence(  # type: ignore[misc]
                    one.output.field, int(one.samples[at]), old, new
                ),
                ranks=lambda at, one=one: block.ranks_of_samples(one.samples[at]),  # type: ignore[misc]
                exact=None if exact is None else exact[one.samples],
            )
            looks[index] = looks[index].merged(compared.looks[0])
    return looks


def sample_values(block: Block, one: Recorded) -> Tensor:
    """(K,) float64. The recorded values of a sample-scope output, at the samples it covers."""
    rows = block.packed.rows[one.samples.numpy()]
    return torch.tensor(one.output.values, dtype=torch.float64)[torch.from_numpy(rows)]

"""The whole batches of steps that hold parts of them: their own samples, and the others behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.compose import LossInputs

WEIGHED = ("old_log_probs", "rollout_log_probs")  # what weights against the sampler are made of
_KEPT = "wide"  # where a block keeps its whole batches


class WholeBatches:
    """A block whose cohorts have the other samples of their rollouts, too.

    Args:
        block: The steps.
        stage: The stage whose statistics they are.

    Attributes:
        block: Of each step its own samples first, as captured, and then the others.
    """

    def __init__(self, block: Block, stage: str) -> None:
        held = [one.others[stage].column_names for one in block.cohorts if stage in one.others]
        names = [one for one in block.packed.table.column_names if all(one in its for its in held)]
        self.block = Block([_joined(one, stage, names) for one in block.cohorts])
        self._own = block.packed.sample_bounds, block.packed.token_bounds
        self._all = self.block.packed.sample_bounds, self.block.packed.token_bounds

    def with_own(self, name: str, values: Tensor) -> Tensor:
        """A column of all samples, its own values replaced.

        Args:
            name: The column, of one value a sample or a token.
            values: What takes the place of the step's own.
        """
        return self.put(self.block.column(name), values, per_token=self.block.per_token(name))

    def put(self, every: Tensor, values: Tensor, *, per_token: bool) -> Tensor:
        """Values of all samples, or tokens, those of the step replaced."""
        found = every.to(values.dtype, copy=True)
        found[self._places(per_token)] = values
        return found

    def own(self, values: Tensor, *, per_token: bool) -> Tensor:
        """Those of the step, of values of all samples or tokens."""
        return values[self._places(per_token)]

    def of_losses(self, given: LossInputs) -> tuple[LossInputs, Tensor]:
        """What weights against the sampler are made of, of all samples, and where the own lie."""
        packed = self.block.packed
        columns = {
            name: self.put(packed.tokens(name), given.columns[name], per_token=True)
            for name in WEIGHED
        }
        mask = self.put(packed.mask, given.mask, per_token=True)
        batches = packed.batches(self.block.settings.layout)
        whole = LossInputs(columns, mask, packed.offsets, cohorts=batches)
        return whole, self._places(per_token=True)

    def _places(self, per_token: bool) -> Tensor:
        own, every = self._own[per_token], self._all[per_token]
        counts = [stop - start for start, stop in pairwise(own)]
        starts: Sequence[int] = every[:-1]
        spans = [torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
        return torch.cat(spans)


def whole_batches(block: Block, stage: str) -> WholeBatches | None:
    """The whole batches that a stage is of; None where every step holds its own whole."""
    if block.settings.layout.batch != "rollout":
        return None
    if all(stage not in one.others for one in block.cohorts):
        return None
    kept: dict[str, WholeBatches] = block.__dict__.setdefault(_KEPT, {})
    if stage not in kept:
        kept[stage] = WholeBatches(block, stage)
    return kept[stage]


def _joined(cohort: LoadedCohort, stage: str, names: list[str]) -> LoadedCohort:
    """A step with the other samples of its rollouts, as far as there are such."""
    table, others = cohort.table.select(names), cohort.others.get(stage)
    if others is not None:
        table = pa.concat_tables([table, others.select(names).cast(table.schema)])
    return replace(cohort, table=table, others={}, chained={}, scores=None)

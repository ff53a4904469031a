"""What a search has to reproduce, and which of its fields no bound can save."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.compare import beyond
from trajreplay.stages.counterfactuals.sparing import Key, Values


def proves(taken: int, differ: int) -> bool:
    """Whether what a fault gives proves anything: so many numbers give as many values, whatever.

    Args:
        taken: Numbers, or choices, of the fault that were read off what was recorded.
        differ: Recorded values that disagree.
    """
    return taken < max(differ, 1)


class Target:
    """What is to be reproduced: what a stage of a cohort recorded.

    Args:
        block: The cohort.
        stage: The stage.
        base: What is recorded, and what the settings give.
        failed: Gets what faults raise.
    """

    def __init__(self, block: Block, stage: str, base: list[Values], failed: list[str]) -> None:
        self.block, self.stage, self.base, self.failed = block, stage, base, failed
        self.differ = sum(int(one.wrong.sum()) for one in base)
        self._missed = {one.key: _missed(one) for one in base}
        self._tolerance = {one.key: block.tolerance(stage, one.field) for one in base}

    def wide(self, key: Key, recorded: Tensor, recomputed: Tensor, share: float) -> Tensor:
        """(E,) bool. Values that can agree with a hypothesis only because its bound is wide.

        Args:
            key: What they are.
            recorded: (E,) float64.
            recomputed: (E,) float64. What the hypothesis gives.
            share: How much of what the settings miss by they may be off.
        """
        error = (recorded - recomputed).abs_()
        too_far = error > share * self._missed[key]
        return too_far.logical_and_(beyond(error, recomputed, self._tolerance[key]))


class Lost:
    """Says of a field whether one of its values is off by so much that no bound saves it.

    Args:
        target: What is recorded.
        share: How much of what the settings miss by a value of a field may be off.

    Attributes:
        fields: Those of which it said so.
    """

    def __init__(self, target: Target, share: Callable[[str], float]) -> None:
        self._target, self._share = target, share
        self._counts = {one.key: one.counts for one in target.base}
        self.fields: set[Key] = set()

    def __call__(self, key: Key, recorded: Tensor, recomputed: Tensor) -> bool:
        """Whether one of its values is off by too much."""
        counts = self._counts.get(key)
        if counts is None or len(counts) != len(recorded):
            return False
        wide = self._target.wide(key, recorded, recomputed, self._share(key[0]))
        if bool(wide.logical_and_(counts).any()):
            self.fields.add(key)
        return key in self.fields


def _missed(one: Values) -> Tensor:
    """(E,) float64. What the settings miss values by; where they do not, the most of the others."""
    missed = (one.recorded - one.recomputed).abs()
    wrong = one.disagree & torch.isfinite(missed)
    known = missed[wrong & one.counts]
    return torch.where(wrong, missed, float(known.max()) if len(known) else torch.inf)

"""Draws of faults: into cohorts of other sizes, rewards and settings, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tests.helpers.fault_columns import handed
from tests.helpers.fault_scenes import SCENES, Scene
from tests.helpers.faulty import PLACE, block_of, differs, explained, with_fault
from tests.helpers.healthy_composed import Draw
from tests.stages.test_composed import CHANGES, STAGES
from trajreplay.schema.columns import has_column
from trajreplay.schema.settings import PROFILES
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.earlier import LOG_PROBS
from trajreplay.stages.explain.explanation import Explanation, Hypothesis
from trajreplay.stages.explain.fit import SURE
from trajreplay.stages.explain.handoffs import explain_column
from trajreplay.stages.faults import FAULTS, Fault

NAMED = {name: changes for name, (changes, _) in CHANGES.items()}
# Ways of one fault that are tried on one cohort before another one is drawn.
WAYS = 4


@dataclass
class Tally:
    """What was said of the draws of one fault.

    Args:
        fault: Its id.
        alone: Draws in which nothing else gives the same numbers and it is the explanation.
        first: Draws in which others do, and it comes first all the same.
        same: Draws in which one that gives the same numbers comes first, and this is said.
        lost: Of the others, what was said.
    """

    fault: str
    alone: int = 0
    first: int = 0
    same: int = 0
    lost: list[str] = field(default_factory=list)

    @property
    def draws(self) -> int:
        """How many there were."""
        return self.alone + self.first + self.same + len(self.lost)

    @property
    def identifiable(self) -> int:
        """Draws in which nothing else was found to give the same numbers."""
        return self.alone + len(self.lost)

    def add(self, found: Explanation) -> None:
        """Count what was said of a draw."""
        mine = (self.fault,)
        said = [
            one.faults
            for one in found.hypotheses
            if one.faults == mine or _is_twin(one, found.misses_by)
        ]
        if mine not in said or said[0] != found.hypotheses[0].faults:
            self.lost.append(found.text)
        elif said == [mine]:
            self.alone += 1
        elif said[0] == mine:
            self.first += 1
        else:
            self.same += 1


def _is_twin(other: Hypothesis, missed: float) -> bool:
    """Whether another fault gives the numbers of the one that was made, which are recorded.

    A bound in which both lie makes none of it: nothing then was told apart that could have been.
    """
    return other.exact or other.max_error <= SURE * missed


# Faults of a step that holds a part of its rollouts, or several: a drawn cohort has none.
_OF_ROLLOUTS = ("reward.other-batch", "advantage.other-batch", "loss.other-batch")


# Faults of a step that others came before: one is made up, since a drawn cohort is alone.
_OF_EARLIER_STEPS = ("kl.stale", "loss.stale")


def _earlier(block: Block, draw: Draw) -> dict[tuple[str, str], Tensor]:
    """Log-probs of the samples of a cohort as a step before it may have captured them."""
    names = [one for one in LOG_PROBS if has_column(block.packed.table, one)]
    noise = draw.numbers.normal(0.0, 0.3, (len(names), len(block.packed.mask)))
    return {
        (name, "the step before"): (block.packed.tokens(name) + torch.from_numpy(gap))
        .clamp(max=-1e-3)
        .float()
        .double()
        for name, gap in zip(names, noise, strict=True)
    }


def can_be_put_in(fault: Fault) -> bool:
    """Whether a fault is a transformation of one cohort, not a finding of a check."""
    made = fault.tries is not None or fault.hands is not None
    return made and fault.id not in _OF_ROLLOUTS


def explanation_of(fault: Fault, seed: int, folder: Path) -> Explanation | None:
    """Put a fault into a cohort that follows from a seed, and explain it.

    Returns:
        None where the fault changes nothing of it.
    """
    if fault.hands is not None:
        given = handed(fault, Draw(seed, NAMED, STAGES))
        return None if given is None else explain_column(given, fault.stage, PLACE, FAULTS)
    faulty = faulty_of(fault, seed, folder)
    return None if faulty is None else explained(faulty, fault.stage, FAULTS)


def faulty_of(fault: Fault, seed: int, folder: Path) -> Block | None:
    """A cohort that follows from a seed with a fault put in; None where that changes nothing."""
    draw = Draw(seed, NAMED, STAGES)
    scene = SCENES.get(fault.id, Scene())
    profile = [None, *PROFILES][seed % (len(PROFILES) + 1)]
    try:
        settings = draw.settings(profile, scene.changes)
    except LookupError:
        return None
    block = block_of(folder, draw, settings, scene.alter, scene.groups)
    if fault.id in _OF_EARLIER_STEPS:
        block.cohorts[0].earlier = _earlier(block, draw)
    return next(_faulty(fault, block, draw, scene), None)


def _faulty(fault: Fault, block: Block, draw: Draw, scene: Scene) -> Iterator[Block]:
    if scene.put is not None:
        made = scene.put(block, draw.choose)
        if made is not None and differs(made, fault.stage, finite=scene.finite):
            yield made
        return
    assert fault.tries is not None
    told = list(fault.tries(block))
    draw.choose.shuffle(told)
    for one in told[:WAYS]:
        made = with_fault(block, fault.stage, one, finite=scene.finite)
        if made is not None:
            yield made

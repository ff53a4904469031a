"""What faults of advantages are made with: the stage's own arithmetic, some of it changed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from trajreplay.schema.settings import Settings, differences
from trajreplay.stages.advantages.estimate import estimated
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant, varied
from trajreplay.stages.faults.fault import (
    Fault,
    Tries,
    WrongAdvantages,
)

STAGE = "advantage.estimate"
Made = tuple[Tensor, Tensor]


def own_estimates(
    block: Block, settings: Settings, given: tuple[Tensor | None, ...], **changes: object
) -> Made:
    """The stage's own arithmetic, some of its settings changed, from what a kernel is given."""
    found = {name: theirs for name, (_, theirs) in differences(block.settings, settings).items()}
    found |= {f"advantage.{name}": one for name, one in changes.items()}
    reward, _, _, kl, _ = given
    assert reward is not None
    columns = {"reward": reward.double()} | ({} if kl is None else {"kl": kl.double()})
    made = estimated(varied(block, Variant(found, columns), (STAGE,)), {}, reward.dtype)
    return made["advantages"], made["returns"]


def wrong(function: Callable[..., Made]) -> Variant:
    """The variant by other arithmetic."""
    return Variant(arithmetic=WrongAdvantages(function))


def fault(name: str, known: str, sentence: str, look: str, tries: Tries, *ref: str) -> Fault:
    """A fault of this stage."""
    return Fault(f"advantage.{name}", known, STAGE, sentence, look, ref, tries)

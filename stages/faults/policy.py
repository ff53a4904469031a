"""What faults of the policy loss are made with: its own terms, some of them changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.compose import LossInputs, PolicyTerms, policy_terms
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Fault,
    Tries,
    WrongLosses,
    held,
)
from trajreplay.stages.kernels import scatter_sum
from trajreplay.stages.wide import whole_batches

STAGE = "loss.policy"
# Scalars that a clip shows in.
CLIPPED = ("pg_loss", "loss", "pg_clipfrac")
Columns = Mapping[str, Tensor]
Terms = dict[str, Tensor]


def own_terms(
    block: Block, settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor
) -> PolicyTerms:
    """The terms that the settings give."""
    return policy_terms(settings.loss, inputs(block, columns, mask, offsets))


def inputs(block: Block, columns: Columns, mask: Tensor, offsets: Tensor) -> LossInputs:
    """What the terms of a loss are made of."""
    batches = block.packed.micro_batches if held(block, "micro_batch_id") else None
    wide = whole_batches(block, STAGE)
    sets = batches, block.packed.batches(block.settings.layout)
    return LossInputs(columns, mask, offsets, *sets, None if wide is None else wide.of_losses)


def changed_terms(block: Block, change: Callable[[Settings, Columns, Terms], Terms]) -> Variant:
    """The variant in which some terms are others."""

    def losses(settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor) -> PolicyTerms:
        own = own_terms(block, settings, columns, mask, offsets)
        return own._replace(terms=own.terms | change(settings, columns, own.terms))

    return Variant(arithmetic=WrongLosses(losses))


def old_log_probs(settings: Settings) -> str:
    """The column whose log-probs are the old ones."""
    return LOG_PROB_SOURCES[settings.loss.old_source]


def trained_tokens(block: Block) -> tuple[Tensor, Tensor]:
    """Trainable tokens of each sample, and the sample of each token."""
    packed = block.packed
    owner = torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths)
    return scatter_sum(packed.weights, owner, len(packed.lengths)), owner


def fault(
    name: str,
    known: str,
    sentence: str,
    look: str,
    tries: Tries,
    *references: str,
    touches: tuple[str, ...] = (),
) -> Fault:
    """A fault of this stage."""
    return Fault(f"loss.{name}", known, STAGE, sentence, look, references, tries, touches=touches)

"""Known ways to hand the policy loss wrong columns: log-probs, advantages, masks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.earlier import LOG_PROBS
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.columns import (
    other_columns,
    shifted_columns,
    stale_columns,
    temperatures,
)
from trajreplay.stages.faults.fault import (
    Told,
    each,
    held,
)
from trajreplay.stages.faults.policy import (
    STAGE,
    fault,
    old_log_probs,
)
from trajreplay.stages.faults.tokens import shifted
from trajreplay.stages.kernels import whiten


def _inverted_ratio(block: Block) -> Iterable[Told]:
    old = old_log_probs(block.settings)
    if held(block, old, "log_probs"):
        packed = block.packed
        swapped = {"log_probs": packed.tokens(old), old: packed.tokens("log_probs")}
        yield Told(Variant(columns=swapped))


def masks(block: Block) -> Iterable[Told]:
    """Other masks of the tokens: all, the inverted one, shifted ones, without the border."""
    packed = block.packed
    mask = packed.mask
    if not bool(mask.all()):
        yield Told(Variant(columns={"loss_mask": torch.ones_like(mask)}), _EVERY)
        yield Told(Variant(columns={"loss_mask": ~mask}), "the inverted mask")
        for by, word in ((1, "late"), (-1, "early")):
            moved = shifted(mask, packed.offsets, by)
            yield Told(Variant(columns={"loss_mask": moved}), f"the mask one token {word}")
            zeroed = moved.clone()
            border = (packed.offsets[:-1] if by > 0 else packed.offsets[1:] - 1)[packed.lengths > 0]
            zeroed[border] = False
            yield Told(Variant(columns={"loss_mask": zeroed}), f"the mask one token {word}, and 0")
            rolled = torch.roll(mask, by)
            yield Told(Variant(columns={"loss_mask": rolled}), f"the packed mask one token {word}")
    for first, word in ((True, "first"), (False, "last")):
        kept = mask.clone()
        kept[(packed.offsets[:-1] if first else packed.offsets[1:] - 1)[packed.lengths > 0]] = False
        if not torch.equal(kept, mask):
            yield Told(Variant(columns={"loss_mask": kept}), f"the mask without the {word} tokens")


_EVERY = "the attention mask: every token of the response"


def _advantages(block: Block) -> Iterable[Told]:
    packed = block.packed
    values = packed.tokens("advantages")
    yield Told(Variant(columns={"advantages": -values}), "the opposite advantages")
    owner = torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths)
    for name in ("reward", "raw_reward"):
        if held(block, name):
            given = packed.scalars(name)[owner]
            yield Told(Variant(columns={"advantages": given}), f"the {name} of the sample")
    if held(block, "returns"):
        yield Told(Variant(columns={"advantages": packed.tokens("returns")}), "the returns")
    if int(packed.mask.sum()) > 1 and bool(torch.isfinite(values).all()):
        white = whiten(values, packed.mask, set_index=packed.cohorts[owner], short="keep")
        yield Told(Variant(columns={"advantages": white}), "advantages that were whitened again")
        means = torch.zeros(len(packed.lengths), dtype=torch.float64)
        means.scatter_reduce_(0, owner, values, "mean", include_self=False)
        yield Told(Variant(columns={"advantages": means[owner]}), "the mean over each sample")
        sums = torch.zeros_like(means).scatter_add_(0, owner, values)
        trained = torch.zeros_like(means).scatter_add_(0, owner, packed.weights)
        over = (sums / trained.clamp(1))[owner]
        detail = "the sum over all tokens of a sample, masked ones too, by its trained tokens"
        yield Told(Variant(columns={"advantages": over}), detail)


FAULTS = (
    fault(
        "old-source",
        "old log-probs from elsewhere",
        "the loss with the {} log-probs in the denominator of the ratio",
        "which log-probs are stored as old ones; loss.old_source",
        each("loss.old_source", ("old", "rollout")),
        "K-069",
        "https://github.com/radixark/miles/pull/1829",
    ),
    fault(
        "mask",
        "another mask",
        "the loss over {}",
        "where the loss mask is made, shifted and sliced; attention mask against loss mask",
        masks,
        "K-013",
        "K-038",
        "https://github.com/verl-project/verl/pull/2543",
    ),
    fault(
        "inverted-ratio",
        "old and current log-probs exchanged",
        "the loss with old and current log-probs exchanged",
        "the order of the operands: current less old",
        _inverted_ratio,
    ),
    fault(
        "columns",
        "log-probs of another model or time",
        "the loss with {}",
        "which log-probs are handed to the loss, and when they were recomputed",
        other_columns(STAGE),
        "K-069",
    ),
    fault(
        "stale",
        "log-probs of an earlier step",
        "the loss with the {}",
        "when old, rollout and reference log-probs are recomputed, and which of them are kept",
        stale_columns(STAGE),
        "K-069",
    ),
    fault(
        "advantages",
        "other advantages",
        "the loss with {}",
        "what the loss is handed as advantages",
        _advantages,
        "K-029",
        "https://github.com/areal-project/AReaL/pull/1346",
    ),
    fault(
        "shifted",
        "a column shifted by a token",
        "the loss with {}",
        "slices [:-1] and [1:] of logits, tokens and masks",
        shifted_columns(STAGE, (*LOG_PROBS, "advantages", "entropy")),
        "K-037",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/605",
    ),
    fault(
        "temperature",
        "log-probs scaled on one side of the ratio",
        "the loss with {}",
        "the temperature of sampler and trainer",
        temperatures(STAGE, ("ppo_kl", "pg_loss", "kl_loss", "loss")),
        "K-031",
        "https://github.com/huggingface/trl/issues/4159",
    ),
)

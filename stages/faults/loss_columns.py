"""Known ways to hand the policy loss wrong columns: log-probs, advantages, masks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trajreplay.stages.block import Block
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
from trajreplay.stages.faults.solved import Misses, together
from trajreplay.stages.faults.tokens import shifted
from trajreplay.stages.kernels import whiten
from trajreplay.stages.variants import Variant


def _inverted_ratio(block: Block) -> Iterable[Told]:
    old = old_log_probs(block.settings)
    if held(block, old, "log_probs"):
        packed = block.packed
        swapped = {"log_probs": packed.tokens(old), old: packed.tokens("log_probs")}
        yield Told(Variant(columns=swapped))


def _columns(block: Block) -> Iterable[Told]:
    """Log-probs of another model or time in the place of the old or current ones."""
    names = ("rollout_log_probs", "old_log_probs", "log_probs", "ref_log_probs")
    old = old_log_probs(block.settings)
    for target in (old, "log_probs"):
        for other in names:
            if other != target and held(block, target, other):
                values = block.packed.tokens(other)
                yield Told(Variant(columns={target: values}), f"{other} for {target}")


def _stale(block: Block) -> Iterable[Told]:
    """What was captured of the same samples at another time, in the place of what the loss read."""
    old = old_log_probs(block.settings)
    reads = block.cohorts[0].abilities[STAGE].reads if STAGE in block.cohorts[0].abilities else ()
    for target in dict.fromkeys((old, "log_probs", "ref_log_probs", "rollout_log_probs")):
        if target in reads:
            yield from stale_columns(block, target)


def stale_columns(block: Block, target: str) -> Iterable[Told]:
    """Tries of log-probs of another time in the place of a column."""
    for (name, when), values in block.cohorts[0].earlier.items():
        # A reference is one model at all times, and stands for no other one.
        if (name == "ref_log_probs") == (target == "ref_log_probs"):
            yield Told(Variant(columns={target: values}), f"{name} of {when} for {target}")


def _shifted(block: Block) -> Iterable[Told]:
    for name in (
        old_log_probs(block.settings),
        "log_probs",
        "advantages",
        "ref_log_probs",
        "entropy",
    ):
        if held(block, name):
            for by, word in ((1, "late"), (-1, "early")):
                values = shifted(block.packed.tokens(name), block.packed.offsets, by)
                yield Told(Variant(columns={name: values}), f"{name} one token {word}")


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


def _temperature(block: Block) -> Iterable[Told]:
    """Temperatures that are usual, that producers state, and that give what was recorded."""
    old = old_log_probs(block.settings)
    if not held(block, old, "log_probs"):
        return
    stated = {
        origin.temperature
        for entry in block.cohorts[0].owners
        for origin in entry.origins.values()
        if origin.temperature
    }
    usual = {0.5, 0.6, 0.7, 0.8, 0.9, 1.2}
    for value in sorted({*usual, *stated, *(1 / one for one in stated)} - {1.0}):
        for name in (old, "log_probs"):
            yield _divided(block, name, value)


def _divided(block: Block, name: str, by: float) -> Told:
    scaled = block.packed.tokens(name) / by
    return Told(Variant(columns={name: scaled}), f"{name} divided by {by:g}")


def _temperature_solved(block: Block) -> Iterable[Told]:
    """Of the old log-probs, or of the current ones: their mean gap is linear in its inverse."""
    old = old_log_probs(block.settings)
    if not held(block, old, "log_probs"):
        return
    misses = Misses(block, STAGE, ("ppo_kl", "pg_loss", "loss"))
    for name in (old, "log_probs"):
        for grid in (_COLD, _HOT):
            for one in misses.between(
                lambda one, name=name: _divided(block, name, one).variant,  # type: ignore[misc]
                grid,
            ):
                if one != 1.0:
                    yield _divided(block, name, one)


_COLD = tuple(number / 100 for number in range(20, 101))
_HOT = tuple(number / 100 for number in range(100, 301))


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
        _columns,
        "K-069",
    ),
    fault(
        "stale",
        "log-probs of an earlier step",
        "the loss with the {}",
        "when old, rollout and reference log-probs are recomputed, and which of them are kept",
        _stale,
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
        _shifted,
        "K-037",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/605",
    ),
    fault(
        "temperature",
        "log-probs scaled on one side of the ratio",
        "the loss with {}",
        "the temperature of sampler and trainer",
        together(_temperature, _temperature_solved),
        "K-031",
        "https://github.com/huggingface/trl/issues/4159",
    ),
)

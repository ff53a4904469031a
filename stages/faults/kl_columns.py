"""Known ways to take the KL of wrong log-probs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import KlSettings
from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.compose import (
    kl_tokens,
)
from trajreplay.stages.faults.fault import (
    Told,
    each,
    held,
    setting,
)
from trajreplay.stages.faults.kl import fault, wrong
from trajreplay.stages.faults.loss_columns import stale_columns
from trajreplay.stages.faults.precision import computing_dtypes, rounding_dtypes
from trajreplay.stages.faults.tokens import shifted
from trajreplay.stages.variants import Variant


def _stale(block: Block) -> Iterable[Told]:
    """Another log-prob column in the place of the policy's or the reference's."""
    policy = LOG_PROB_SOURCES[setting(block, "kl.policy_source")]
    if not setting(block, "kl.coef") or not held(block, policy, "ref_log_probs"):
        return
    for other in ("rollout_log_probs", "old_log_probs", "log_probs"):
        if other != policy and held(block, other):
            values = block.packed.tokens(other)
            yield Told(Variant(columns={policy: values}), f"{other} for {policy}")
            yield Told(Variant(columns={"ref_log_probs": values}), f"{other} for ref_log_probs")


def _earlier(block: Block) -> Iterable[Told]:
    if setting(block, "kl.coef"):
        for target in (LOG_PROB_SOURCES[setting(block, "kl.policy_source")], "ref_log_probs"):
            yield from stale_columns(block, target)


def _shift(block: Block) -> Iterable[Told]:
    policy = LOG_PROB_SOURCES[setting(block, "kl.policy_source")]
    for name in (policy, "ref_log_probs"):
        if setting(block, "kl.coef") and held(block, name):
            for by, word in ((1, "one token late"), (-1, "one token early")):
                values = shifted(block.packed.tokens(name), block.packed.offsets, by)
                yield Told(Variant(columns={name: values}), f"{name} {word}")


def _rounded(block: Block) -> Iterable[Told]:
    if not setting(block, "kl.coef"):
        return
    policy = LOG_PROB_SOURCES[setting(block, "kl.policy_source")]
    for dtype, name in computing_dtypes(block.packed.tokens("kl")):

        def computed(kl: KlSettings, mine: Tensor, ref: Tensor, to: torch.dtype = dtype) -> Tensor:
            return kl_tokens(kl, mine.to(to), ref.to(to)).to(mine.dtype)

        yield Told(wrong(computed), f"computed in {name}")
    for dtype, name in rounding_dtypes():

        def result(kl: KlSettings, mine: Tensor, ref: Tensor, to: torch.dtype = dtype) -> Tensor:
            return kl_tokens(kl, mine, ref).to(to).to(mine.dtype)

        yield Told(wrong(result), f"rounded to {name}")
        if held(block, policy, "ref_log_probs"):
            narrow = {
                one: block.packed.tokens(one).to(dtype).double()
                for one in (policy, "ref_log_probs")
            }
            yield Told(Variant(columns=narrow), f"of log-probs in {name}")


def _leaked(block: Block) -> Iterable[Told]:
    """0 times NaN is NaN: what is masked by multiplication stays NaN."""
    if not setting(block, "kl.coef"):
        return
    packed = block.packed

    def multiplied(kl: KlSettings, policy: Tensor, ref: Tensor) -> Tensor:
        masked = kl_tokens(kl, policy, ref) * packed.mask
        owner = torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths)
        odd = torch.zeros(len(packed.lengths), dtype=torch.bool)
        odd[owner[masked.isnan()]] = True
        return torch.where(odd[owner], torch.nan, masked)

    if not bool(torch.isfinite(packed.tokens("kl")).all()):
        yield Told(wrong(multiplied))


FAULTS = (
    fault(
        "source",
        "sampler and trainer log-probs exchanged",
        "the KL of the {} log-probs",
        "kl.policy_source",
        each("kl.policy_source", ("old", "rollout")),
    ),
    fault(
        "other-column",
        "log-probs of another model or time",
        "the KL with {}",
        "which log-probs stand for policy and reference; kl.policy_source",
        _stale,
        "K-069",
    ),
    fault(
        "stale",
        "log-probs of an earlier step",
        "the KL with the {}",
        "when log-probs of policy and reference are recomputed, and which of them are kept",
        _earlier,
        "K-069",
    ),
    fault(
        "shifted",
        "log-probs shifted by a token",
        "the KL with {}",
        "slices [:-1] and [1:] of logits, tokens and masks",
        _shift,
        "K-037",
    ),
    fault(
        "leaked",
        "NaN on a masked token leaks through multiplication",
        "NaN wherever a masked token of the sample has one: 0 times NaN is NaN",
        "masks applied by multiplication: choose with where instead",
        _leaked,
        "K-064",
        "https://github.com/NovaSky-AI/SkyRL/pull/1635",
    ),
    fault(
        "precision",
        "KL in reduced precision",
        "the KL {}",
        "dtype of log-probs and of the KL",
        _rounded,
        "K-050",
    ),
)

"""Known ways to take the KL of wrong log-probs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import KlSettings
from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.cohorts.earlier import LOG_PROBS
from trajreplay.stages.compose import (
    kl_tokens,
)
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
    setting,
)
from trajreplay.stages.faults.kl import STAGE, fault, wrong
from trajreplay.stages.faults.precision import computing_dtypes, rounding_dtypes


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
        other_columns(STAGE, LOG_PROBS[:-1]),
        "K-069",
    ),
    fault(
        "stale",
        "log-probs of an earlier step",
        "the KL with the {}",
        "when log-probs of policy and reference are recomputed, and which of them are kept",
        stale_columns(STAGE),
        "K-069",
    ),
    fault(
        "shifted",
        "log-probs shifted by a token",
        "the KL with {}",
        "slices [:-1] and [1:] of logits, tokens and masks",
        shifted_columns(STAGE, LOG_PROBS),
        "K-037",
    ),
    fault(
        "temperature",
        "log-probs scaled on one side of the KL",
        "the KL with {}",
        "the temperature of policy and reference",
        temperatures(STAGE, ("kl",)),
        "K-031",
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

"""Known ways to add token losses up wrong: denominators and factors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.factors import factors
from trajreplay.stages.faults.fault import (
    Told,
    each,
    held,
    setting,
)
from trajreplay.stages.faults.policy import (
    STAGE,
    Columns,
    Terms,
    changed_terms,
    fault,
    trained_tokens,
)
from trajreplay.stages.kernels import scatter_sum


def _weighted(block: Block, weights: Tensor, *, loss_only: bool) -> Variant:
    """Every term, or only the loss, times a weight of each token."""

    def change(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        loss = settings.loss
        if not loss_only:
            return {name: one * weights.to(one.dtype) for name, one in terms.items()}
        total = terms["pg_loss"]
        if "entropy_loss" in terms:
            total = total - loss.entropy_coef * terms["entropy_loss"]
        if "kl_loss" in terms:
            total = total + loss.kl_loss_coef * terms["kl_loss"]
        return {"loss": total * weights.to(total.dtype)}

    return changed_terms(block, change)


def _both(block: Block, weights: Tensor, detail: str) -> Iterable[Told]:
    if bool((weights != 1).any()) and bool(torch.isfinite(weights).all()):
        yield Told(_weighted(block, weights, loss_only=False), detail)
        yield Told(_weighted(block, weights, loss_only=True), f"{detail}, the loss alone")


def _by_parts(block: Block) -> Iterable[Told]:
    """A mean of the means of ranks or micro-batches instead of one mean over all."""
    packed = block.packed
    trained, owner = trained_tokens(block)
    parts = {"rank": (packed.cohort_ranks, torch.zeros_like(packed.cohort_ranks))}
    if held(block, "micro_batch_id"):
        zeros = torch.zeros_like(packed.micro_batches)
        parts["micro-batch"] = (packed.micro_batches, zeros)
        parts["micro-batch of a rank"] = (packed.micro_batches, packed.cohort_ranks)
    by_tokens = setting(block, "loss.aggregation") == "token-mean"
    stated = _stated_denominator(block)
    for what, (part, whole) in parts.items():
        for counts, told in ((trained, "tokens"), (torch.ones_like(trained), "samples")):
            if told == "samples" and by_tokens:
                continue
            own = scatter_sum(counts, part, int(part.max()) + 1)
            every = scatter_sum(counts, whole, int(whole.max()) + 1)
            pairs = torch.unique(torch.stack([part, whole]), dim=1)
            number = torch.bincount(pairs[1], minlength=len(every)).double()
            weights = every[whole] / (number[whole] * own[part].clamp(1))
            yield from _both(block, weights[owner], f"{what} by its own {told}")
            if stated is not None:
                weights = stated / own[part].clamp(1)
                detail = f"{what} by its own {told}, not by the {stated:g} that are stated"
                yield from _both(block, weights[owner], detail)


def _stated_denominator(block: Block) -> float | None:
    """What the recorded scalars say that they were divided by, where they agree."""
    (cohort,) = block.cohorts
    outputs = [one for entry in cohort.owners for one in entry.outputs if one.stage == STAGE]
    found = {one.denominator for one in outputs if one.values is None}
    return next(iter(found)) if len(found) == 1 else None


def _per_token(block: Block) -> Iterable[Told]:
    """Denominators that count masked tokens, or none."""
    packed = block.packed
    trained, owner = trained_tokens(block)
    lengths = packed.lengths.double()
    by_tokens = setting(block, "loss.aggregation") == "token-mean"
    if by_tokens:
        ratio = (trained.sum() / lengths.sum().clamp(1)).expand(len(owner))
    else:
        ratio = (trained.clamp(1) / lengths.clamp(1))[owner]
    yield from _both(block, ratio, "all response tokens, masked ones too")
    if not by_tokens and len(lengths):
        longest = (trained.clamp(1) / lengths.max().clamp(1))[owner]
        yield from _both(block, longest, "the longest response")


def _dropped(block: Block) -> Iterable[Told]:
    trained, owner = trained_tokens(block)
    by_tokens = setting(block, "loss.aggregation") == "token-mean"
    count = trained.sum().expand(len(owner)) if by_tokens else trained.clamp(1)[owner]
    yield from _both(block, count, "1")


def _aggregation(block: Block) -> Iterable[Told]:
    longest = float(block.packed.lengths.max()) if len(block.packed.lengths) else 1.0
    for one in ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum"):
        if one != setting(block, "loss.aggregation"):
            yield Told(Variant({"loss.aggregation": one}), one)
    if setting(block, "loss.aggregation") != "constant-norm":
        changes = {"loss.aggregation": "constant-norm", "loss.constant_norm": longest}
        yield Told(Variant(changes), "constant-norm by the longest response")


FAULTS = (
    fault(
        "parts-averaged",
        "each rank, or micro-batch, divides by its own count",
        "the mean of the losses of each {}",
        "where the token count is reduced over ranks and accumulation steps",
        _by_parts,
        "K-056",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/2562",
    ),
    fault(
        "denominator-dropped",
        "summed and not averaged: the smaller instead of the larger of token count and 1",
        "the loss with the denominator {}",
        "min against max of the token count and 1",
        _dropped,
        "K-059",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/816",
    ),
    fault(
        "denominator",
        "tool or truncated tokens in the denominator",
        "the loss divided by {}",
        "which mask the denominator is counted with",
        _per_token,
        "K-060",
        "https://github.com/THUDM/slime/pull/365",
    ),
    fault(
        "factor",
        "divided or multiplied once more",
        "the loss {}",
        "factors of gradient accumulation, data and context parallelism",
        factors(STAGE),
        "K-055",
        "K-057",
        "K-066",
        "https://github.com/modelscope/ms-swift/issues/10117",
    ),
    fault(
        "aggregation",
        "another aggregation",
        "the loss aggregated by {}",
        "loss.aggregation",
        _aggregation,
        "K-055",
        "https://github.com/verl-project/verl/issues/3741",
    ),
    fault(
        "denominator-rows",
        "samples without tokens in the denominator",
        "the mean over {} samples",
        "loss.denominator_rows: verl counts those with tokens",
        each("loss.denominator_rows", ("all", "with-tokens")),
    ),
    fault(
        "fragments",
        "denominators of fragments or of trajectories",
        "the mean over tokens of {} trajectory",
        "loss.fragments",
        each(
            "loss.fragments",
            ("own", "shared"),
            {"own": "each fragment, not of its", "shared": "the whole"}.__getitem__,
        ),
    ),
)

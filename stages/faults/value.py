"""Known ways to get the value loss wrong: its clip, its columns, its mask, its factor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.compose import PolicyTerms, value_terms, value_tokens
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.columns import shifted_columns
from trajreplay.stages.faults.factors import factors
from trajreplay.stages.faults.fault import Fault, Told, Tries, WrongLosses, each, held, setting
from trajreplay.stages.faults.loss_columns import masks
from trajreplay.stages.faults.policy import Columns, inputs
from trajreplay.stages.faults.precision import (
    computed_in,
    computing_dtypes,
    recorded_scalars,
    rounding_dtypes,
)
from trajreplay.stages.faults.solved import TWO_DIGITS, solved, together

STAGE = "loss.value"
_CLIPS = tuple(one for one in TWO_DIGITS if 1e-3 <= one <= 10.0)
_COLUMNS = ("values", "old_values", "returns")


def _fault(
    name: str, known: str, sentence: str, look: str, tries: Tries, *references: str
) -> Fault:
    return Fault(f"value.{name}", known, STAGE, sentence, look, references, tries)


def _chosen(choose: Callable[[Tensor, Tensor], Tensor]) -> Tries:
    """Tries of a loss that is chosen otherwise from the plain and the clipped one."""

    def tries(block: Block) -> Iterable[Told]:
        if setting(block, "value.clip") is None or not held(block, "old_values"):
            return

        def losses(
            settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor
        ) -> PolicyTerms:
            own, c = settings.value, settings.value.clip
            assert c is not None
            old = columns["old_values"]
            bounded = old + (columns["values"] - old).clamp(-c, c)
            terms = value_terms(own, columns)
            free = replace(own, clip=None)
            plain, limited = (
                value_terms(free, {**columns, "values": one})["value_loss"]
                for one in (columns["values"], bounded)
            )
            terms["value_loss"] = choose(plain, limited)
            tokens = value_tokens(settings, inputs(block, columns, mask, offsets))
            return PolicyTerms(terms, tokens, tokens)

        yield Told(Variant(arithmetic=WrongLosses(losses)))

    return tries


def _clip(block: Block) -> Iterable[Told]:
    for one in (None, 0.2, 0.5):
        if one != setting(block, "value.clip"):
            yield Told(Variant({"value.clip": one}), "no clip" if one is None else f"clip {one:g}")


def _exchanged(block: Block) -> Iterable[Told]:
    for one, other in (("values", "old_values"), ("values", "returns"), ("old_values", "returns")):
        if held(block, one, other):
            swapped = {one: block.packed.tokens(other), other: block.packed.tokens(one)}
            yield Told(Variant(columns=swapped), f"{one} and {other}")


def _columns(block: Block) -> Iterable[Told]:
    """What is there under another name, and what an off-by-one slice makes of what is."""
    for target, other in (
        ("values", "old_values"),
        ("old_values", "values"),
        ("returns", "advantages"),
        ("returns", "values"),
    ):
        if held(block, target, other):
            told = {target: block.packed.tokens(other)}
            yield Told(Variant(columns=told), f"{other} for {target}")
    if held(block, "returns") and held(block, "reward"):
        owner = torch.arange(len(block.packed.lengths)).repeat_interleave(block.packed.lengths)
        rewards = block.packed.scalars("reward")[owner]
        yield Told(Variant(columns={"returns": rewards}), "the reward of the sample for returns")


def _aggregation(block: Block) -> Iterable[Told]:
    own = setting(block, "value.aggregation")
    in_force = setting(block, "loss.aggregation") if own == "same" else own
    for one in ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum"):
        if one != in_force:
            yield Told(Variant({"value.aggregation": one}), one)
    for one in ("scope", "micro-batch"):
        if one != _mean_over(block):
            over = "each micro-batch" if one == "micro-batch" else "the whole step"
            yield Told(Variant({"value.mean_over": one}), f"{in_force} over {over}")


def _mean_over(block: Block) -> str:
    own = str(setting(block, "value.mean_over"))
    return str(setting(block, "loss.mean_over")) if own == "same" else own


def _huber(block: Block) -> Iterable[Told]:
    for one in (None, 10.0):
        if one != setting(block, "value.huber_delta"):
            word = "squared throughout" if one is None else f"linear from {one:g} on"
            yield Told(Variant({"value.huber_delta": one}), word)


def _precision(block: Block) -> Iterable[Told]:
    def own(settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor) -> PolicyTerms:
        tokens = value_tokens(settings, inputs(block, columns, mask, offsets))
        return PolicyTerms(value_terms(settings.value, columns), tokens, tokens)

    for dtype, name in computing_dtypes(recorded_scalars(block, STAGE)):
        yield Told(computed_in(dtype, own), f"computed in {name}")
    for dtype, name in rounding_dtypes():
        names = [one for one in _COLUMNS if held(block, one)]
        narrow = {one: block.packed.tokens(one).to(dtype).double() for one in names}
        yield Told(Variant(columns=narrow), f"of columns in {name}")
        for one in names:
            yield Told(Variant(columns={one: narrow[one]}), f"of {one} in {name}")


FAULTS = (
    _fault(
        "clip",
        "another clip of the value",
        "the value loss with {}",
        "value.clip: 0.2 in slime, Relax and TRL, 0.5 in verl, OpenRLHF and AReaL, none in NeMo-RL",
        together(_clip, solved("value.clip", STAGE, ("value_loss",), _CLIPS)),
    ),
    _fault(
        "clipped-alone",
        "only the clipped value loss",
        "the clipped value loss alone, whatever the plain one is",
        "the maximum of plain and clipped loss",
        _chosen(lambda plain, limited: limited),
    ),
    _fault(
        "optimistic",
        "the smaller instead of the larger of the two value losses",
        "the smaller of plain and clipped value loss",
        "the maximum of plain and clipped loss",
        _chosen(torch.minimum),
    ),
    _fault(
        "factor",
        "the factor of the squared error",
        "the value loss with the factor {}",
        "value.factor: 1 in slime and Relax, 1/2 elsewhere, and TRL's coefficient of 0.1 beside it",
        each("value.factor", (0.5, 1.0, 0.05, 0.1), "{:g}".format),
    ),
    _fault(
        "huber",
        "squared or Huber",
        "the value loss {}",
        "value.huber_delta",
        _huber,
    ),
    _fault(
        "exchanged",
        "columns of the critic exchanged",
        "the value loss with {} exchanged",
        "the order in which values, old values and returns are handed to the loss",
        _exchanged,
    ),
    _fault(
        "columns",
        "stale values, or other targets",
        "the value loss with {}",
        "which values are those before the update, and which targets the critic is fitted to",
        _columns,
    ),
    _fault(
        "shifted",
        "a column of the critic shifted by a token",
        "the value loss with {}",
        "slices [:-1] and [1:] of values, tokens and masks",
        shifted_columns(STAGE, _COLUMNS),
    ),
    _fault(
        "mask",
        "another mask of the value loss",
        "the value loss over {}",
        "where the mask is made, shifted and sliced; NeMo-RL does not shift that of the critic",
        masks,
    ),
    _fault(
        "counts",
        "other tokens in the value loss",
        "the value loss of the {} tokens",
        "value.counts: whether rejection changes the mask of the critic",
        each("value.counts", ("trained", "kept", "response")),
    ),
    _fault(
        "aggregation",
        "another aggregation of the value loss",
        "the value loss aggregated by {}",
        "value.aggregation: of its own in verl's critic",
        _aggregation,
    ),
    _fault(
        "times",
        "the value loss divided or multiplied once more",
        "the value loss {}",
        "factors of gradient accumulation, data and context parallelism",
        factors(STAGE),
    ),
    _fault(
        "counted",
        "the clip fraction by another definition",
        "clip fractions of tokens whose {} is clipped",
        "value.counted; the loss itself may be right",
        each("value.counted", ("loss", "value")),
    ),
    _fault(
        "precision",
        "the value loss in reduced precision",
        "the value loss {}",
        "dtype of the critic's values and of what they are fitted to",
        _precision,
    ),
)

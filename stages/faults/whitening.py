"""Known ways to whiten and clip advantages wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from itertools import product

import torch
from torch import Tensor

from trajreplay.schema.settings import AdvantageSettings, Settings, with_changes
from trajreplay.stages.advantages.whitening_sets import tokens_of
from trajreplay.stages.block import Block
from trajreplay.stages.compose import AdvantageInputs, calls
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.estimates import Made, fault, own_estimates, wrong
from trajreplay.stages.faults.fault import (
    Told,
    held,
    other_batch,
    setting,
    under,
)
from trajreplay.stages.faults.solved import TWO_DIGITS, solved_bounds
from trajreplay.stages.faults.tokens import shifted
from trajreplay.stages.kernels import whiten

# Settings under which nothing is whitened: what says how would contradict that there.
_UNWHITENED: dict[str, object] = {
    one.name: one.default
    for one in fields(AdvantageSettings)
    if one.name.startswith("whiten_") or one.name in ("clip", "returns")
} | {"whiten": "none"}


def _white(
    block: Block, settings: Settings, values: Tensor, mask: Tensor, sets: Tensor | None = None
) -> Tensor:
    """(N,) Values whitened as the settings say, over sets of tokens if other ones are given."""
    own = settings.advantage
    given = AdvantageInputs(
        mask,
        block.packed.offsets,
        whitened_with=tokens_of(block, own.whiten) if sets is None else sets,
        centred_with=tokens_of(block, own.whiten_centre),
    )
    return whiten(values, **calls.whitening(own, given))


def _made(settings: Settings, white: Tensor, returns: Tensor) -> Made:
    """Whitened advantages within their bounds, and the returns that go with them."""
    bounds = settings.advantage.clip
    handed_on = white if calls.returns_whitened(settings.advantage) else returns
    return (white if bounds is None else white.clamp(*bounds)), handed_on


def _plain(block: Block, settings: Settings, given: tuple[Tensor, ...]) -> Made:
    """What is whitened: advantages and returns before that."""
    return own_estimates(block, settings, given, **_UNWHITENED)


def _whitened_over_masked(block: Block) -> Iterable[Told]:
    if setting(block, "advantage.whiten") == "none" or bool(block.packed.mask.all()):
        return

    own, offsets = block.packed.mask, block.packed.offsets
    others = {
        "masked tokens counted": torch.ones_like(own),
        "only masked tokens counted": ~own,
        "the mask one token late": shifted(own, offsets, 1),
        "the mask one token early": shifted(own, offsets, -1),
    }
    for words, other in others.items():

        def over_others(settings: Settings, *given: Tensor, other: Tensor = other) -> Made:
            found, returns = _plain(block, settings, given)
            return _made(settings, _white(block, settings, found, other), returns)

        yield Told(wrong(over_others), words)


def _whitened_in(block: Block) -> Iterable[Told]:
    """Statistics of micro-batches, which no setting names."""
    if not held(block, "micro_batch_id"):
        return
    sets = block.packed.micro_batches.repeat_interleave(block.packed.lengths)

    def shared(settings: Settings, *given: Tensor) -> Made:
        found, returns = _plain(block, settings, given)
        return _made(settings, _white(block, settings, found, given[1], sets), returns)

    yield Told(wrong(shared), "micro-batch")


def _clipped_first(block: Block) -> Iterable[Told]:
    bounds = setting(block, "advantage.clip")
    if bounds is None or setting(block, "advantage.whiten") == "none":
        return

    def first(settings: Settings, *given: Tensor) -> Made:
        found, returns = _plain(block, settings, given)
        white = _white(block, settings, found.clamp(*bounds), given[1])
        free = with_changes(settings, {"advantage.clip": None})
        return _made(free, white, returns)

    yield Told(wrong(first))


def _wrong_axis(block: Block) -> Iterable[Told]:
    """Statistics of rows taken for those of columns, which only a square shape allows."""
    packed = block.packed
    size = len(packed.lengths)
    if size < 2 or not bool((packed.lengths == size).all()):
        return

    def crossed(settings: Settings, *given: Tensor) -> Made:
        found, returns = own_estimates(block, settings, given, whiten="none", clip=None)
        own = settings.advantage
        x, weights = found.view(size, size), given[1].to(found.dtype).view(size, size)
        count = weights.sum(1)
        centred = x - (x * weights).sum(1) / count.clamp(1)
        squares = (centred**2 * weights).sum(1) / (count - own.whiten_ddof).clamp(1)
        return (centred / (squares + own.whiten_epsilon).sqrt()).flatten(), returns

    yield Told(wrong(crossed))


def _whiten_switches(block: Block) -> Iterable[Told]:
    names = {
        "none": "no tokens",
        "cohort": "all tokens of the cohort",
        "rank": "the tokens of each rank",
        "context-rank": "the tokens of each context-parallel rank",
        "consumer-batch": "the tokens of each consumer batch",
        "group": "the tokens of each group",
        "sample": "the tokens of each sample",
    }
    alike = set()  # sets that are the whole cohort here
    if int(block.packed.cohort_ranks.max()) == 0:
        alike.add("rank")
    if all(one.parallel.context_size == 1 for cohort in block.cohorts for one in cohort.owners):
        alike.add("context-rank")
    if not held(block, "consumer_batch_id"):
        alike.add("consumer-batch")
    for one, what in names.items():
        if one != setting(block, "advantage.whiten") and one not in alike:
            yield Told(Variant({"advantage.whiten": one}), what)


def _forms(block: Block) -> Iterable[Told]:
    own = block.settings.advantage
    if own.whiten == "none":
        return
    for ddof, form, epsilon in product((0, 1), ("added", "floored", "std"), (1e-8, 1e-5, 1e-6)):
        found = (ddof, form, epsilon)
        if found != (own.whiten_ddof, own.whiten_form, own.whiten_epsilon):
            changes = {
                "advantage.whiten_ddof": ddof,
                "advantage.whiten_form": form,
                "advantage.whiten_epsilon": epsilon,
            }
            detail = f"with divisor {'n - 1' if ddof else 'n'}, epsilon {epsilon:g} {form}"
            yield Told(Variant(changes), detail)
    yield Told(Variant({"advantage.whiten_one_pass": not own.whiten_one_pass}), "in one pass")
    yield Told(Variant({"advantage.whiten_scale": not own.whiten_scale}), "only centred")


FAULTS = (
    fault(
        "whitened-over",
        "whitening over another set of tokens",
        "advantages whitened over {}",
        "the process group of the reduction: with or without context parallelism; advantage.whiten",
        _whiten_switches,
        "K-006",
        "https://github.com/THUDM/slime/pull/2235",
    ),
    fault(
        "whitened-masked",
        "masked tokens in the whitening statistics",
        "advantages whitened with {}",
        "whether the mask reaches mean and variance",
        _whitened_over_masked,
    ),
    fault(
        "whitened-form",
        "whitening by another formula",
        "advantages whitened {}",
        "advantage.whiten_ddof, whiten_form, whiten_epsilon, whiten_one_pass, whiten_scale",
        _forms,
    ),
    fault(
        "whitened-in-parts",
        "whitening statistics of parts of the batch",
        "advantages whitened within each {}",
        "where advantages are whitened: before or after the split into micro-batches",
        _whitened_in,
    ),
    fault(
        "other-batch",
        "statistics of a step for those of a rollout, or the other way round",
        "advantages whitened {}",
        "layout.batch; whether advantages are whitened before a rollout is cut into steps",
        other_batch,
    ),
    fault(
        "wrong-axis",
        "per-row statistics broadcast along the wrong axis",
        "advantages whitened with the statistics of rows broadcast over columns",
        "keepdim of mean and deviation: a square shape hides it",
        _wrong_axis,
        "K-021",
        "https://github.com/OpenRLHF/OpenRLHF/pull/1250",
    ),
    fault(
        "clip-off",
        "advantage clipping configured and not applied",
        "advantages that are not clipped",
        "advantage.clip",
        under(advantage__clip=None),
    ),
    fault(
        "clip-bounds",
        "other bounds of the advantages",
        "advantages clipped to {}",
        "advantage.clip",
        solved_bounds("advantage.clip", "advantage.estimate", ("advantages",), TWO_DIGITS),
    ),
    fault(
        "clip-first",
        "advantages clipped before instead of after whitening",
        "advantages clipped before they were whitened",
        "the order of clip and whitening",
        _clipped_first,
    ),
)

"""The shape of an error that no fault reproduces: on which values it lies, and how it grows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.sparing import Values

# A shape explains an error that it leaves less than this part of.
LEFT = 1e-3
# That so many wrong values lie in a part of all is no chance where it is less likely than this.
CHANCE = 1e-3
# What is a cohort's own in a sentence: counts in brackets, numbers, ids and quoted names.
_OWN = re.compile(r" \([^)]*\)|'[^']*'|\S*\d\S*")


@dataclass(frozen=True)
class Shape:
    """Something that the errors of a stage have in common.

    Args:
        says: A clause, to follow "the error is".
        kind: What it is, whatever its size and place.
        certain: Whether other errors as many would hardly have it: few values fit much.
    """

    says: str
    kind: str
    certain: bool


def without_own(sentence: str) -> str:
    """A sentence without the numbers and names of its cohort, to tell kinds apart by.

    >>> without_own("only at rank 3 (4 of 8 samples)"), without_own("a constant factor of 1.37")
    ('only at rank *', 'a constant factor of *')
    """
    return _OWN.sub(lambda found: "" if found[0].startswith(" (") else "*", sentence)


def residual_shapes(block: Block, base: list[Values]) -> list[Shape]:
    """What the errors of a stage have in common, field by field, the tightest first.

    Args:
        block: The cohort.
        base: What was recorded and what it should be.
    """
    found: list[Shape] = []
    for one in base:
        wrong = one.wrong
        if not bool(wrong.any()):
            continue
        name = f"{one.field}: " if len(base) > 1 else ""
        shapes = [*_sizes(block, one, wrong), *_places(block, one, wrong)]
        found += [Shape(name + each.says, name + each.kind, each.certain) for each in shapes]
    return found


def _sizes(block: Block, one: Values, wrong: Tensor) -> Iterator[Shape]:
    """How large: a constant factor or offset over all, or over each of some sets."""
    recorded, right = one.recorded[wrong], one.recomputed[wrong]
    if not bool(torch.isfinite(recorded).all()):
        bad = int((~torch.isfinite(recorded)).sum())
        yield Shape(f"NaN or infinity at {bad} of {len(recorded)}", "not finite", True)
        return
    if not bool(torch.isfinite(right).all()):
        return
    if len(recorded) == 1:
        if float(right[0]):  # which any error of one value is
            yield Shape(f"a factor of {float(recorded[0] / right[0]):.6g}", "factor", False)
        return
    if bool((recorded == recorded[0]).all()):
        said = f"all that was recorded there is {float(recorded[0]):.6g}"
        yield Shape(said, "one value", True)
        return
    everywhere = torch.zeros(len(recorded), dtype=torch.int64)
    factor, left = _factors(recorded, right, everywhere)
    if left < LEFT:
        yield Shape(f"a constant factor of {float(factor[0]):.6g}", "factor", True)
        return
    offset, left = _offsets(recorded, right, everywhere)
    if left < LEFT:
        yield Shape(f"a constant offset of {float(offset[0]):.6g}", "offset", True)
        return
    for what, index in _sets(block, one):
        mine = index[wrong]
        if len(torch.unique(mine)) == len(mine):
            continue  # one value a set fits anything
        factor, left = _factors(recorded, right, mine)
        if left < LEFT:
            used = factor[torch.unique(mine)]
            said = f"a factor for each {what}, from {used.min():.6g} to {used.max():.6g}"
            yield Shape(said, f"factor of {what}", True)
            return
        offset, left = _offsets(recorded, right, mine)
        if left < LEFT:
            used = offset[torch.unique(mine)]
            said = f"an offset for each {what}, from {used.min():.6g} to {used.max():.6g}"
            yield Shape(said, f"offset of {what}", True)
            return


def _sets(block: Block, one: Values) -> Iterator[tuple[str, Tensor]]:
    packed = block.packed
    if one.per == "scalar":
        return
    samples = one.samples
    if len(torch.unique(packed.cohort_ranks)) > 1:
        yield "rank", packed.cohort_ranks[samples]
    names = packed.table.column_names
    if "group_id" in names and not packed.table["group_id"].null_count:
        yield "group", packed.groups[samples]
    if "micro_batch_id" in names and not packed.table["micro_batch_id"].null_count:
        yield "micro-batch", packed.micro_batches[samples]
    if one.per == "token":
        yield "sample", samples
        yield "position", _positions(block)


def _positions(block: Block) -> Tensor:
    packed = block.packed
    starts = packed.offsets[:-1].repeat_interleave(packed.lengths)
    return torch.arange(len(starts)) - starts


def _factors(recorded: Tensor, right: Tensor, index: Tensor) -> tuple[Tensor, float]:
    """The factor of each set by least squares, and the part of the error that it leaves."""
    size = int(index.max()) + 1
    zeros = torch.zeros(size, dtype=torch.float64)
    top = zeros.scatter_add(0, index, recorded * right)
    factor = top / zeros.scatter_add(0, index, right**2).clamp_min(1e-300)
    return factor, _left(recorded - factor[index] * right, recorded - right)


def _offsets(recorded: Tensor, right: Tensor, index: Tensor) -> tuple[Tensor, float]:
    size = int(index.max()) + 1
    zeros = torch.zeros(size, dtype=torch.float64)
    count = zeros.scatter_add(0, index, torch.ones_like(recorded)).clamp_min(1)
    offset = zeros.scatter_add(0, index, recorded - right) / count
    return offset, _left(recorded - right - offset[index], recorded - right)


def _left(rest: Tensor, error: Tensor) -> float:
    return float(rest.abs().max() / error.abs().max().clamp_min(1e-300))


def _places(block: Block, one: Values, wrong: Tensor) -> Iterator[Shape]:
    """Where: kinds of values that hold every error, while others of the cohort hold none."""
    if one.per == "scalar":
        ranks = {place for place, bad in zip(one.places, wrong.tolist(), strict=True) if bad}
        if one.places and len(ranks) < len(set(one.places)):
            share = float(wrong.sum()) / len(wrong)
            said = f"only at {', '.join(sorted(ranks)[:4])}"
            yield Shape(said, "some ranks", _is_no_chance(share, int(wrong.sum())))
        return
    samples = len(torch.unique(one.samples[wrong]))
    for what, kind, chosen, by_value in _kinds(block, one):
        mine = chosen & one.counts
        inside, outside = wrong & mine, wrong & ~mine
        if bool(inside.any()) and not bool(outside.any()) and bool((one.counts & ~mine).any()):
            count, of = int(inside.sum()), int(mine.sum())
            share = of / int(one.counts.sum())
            # Tokens of one sample have its sign and rank together.
            certain = bool(kind) and _is_no_chance(share, count if by_value else samples)
            yield Shape(f"only at {what} ({count} of {of} {one.per}s)", kind or what, certain)


def _is_no_chance(share: float, count: int) -> bool:
    """Whether so many values, the first of which chose the place, hardly lie in it by chance."""
    return share ** (count - 1) < CHANCE


def _kinds(block: Block, one: Values) -> Iterator[tuple[str, str, Tensor, bool]]:
    """Places: in words, their kind, (E,) bool, and whether values lie there each for itself.

    What fits any error, since its bound is read off the errors, is of no kind.
    """
    packed, samples = block.packed, one.samples
    lengths = packed.lengths[samples].double()
    names = packed.table.column_names
    yield f"negative {one.field}", "negative", one.recomputed < 0, False
    yield f"positive {one.field}", "positive", one.recomputed > 0, False
    wrong = one.wrong
    yield "one sample", "one sample", samples == samples[wrong][0], True
    ranks = packed.cohort_ranks[samples]
    rank = int(packed.ranks[int(samples[wrong][0])])
    yield f"rank {rank}", "one rank", ranks == ranks[wrong][0], False
    if "group_id" in names and not packed.table["group_id"].null_count:
        groups = packed.groups[samples]
        group = packed.text("group_id", int(samples[wrong][0]))
        yield f"group {group}", "one group", groups == groups[wrong][0], False
    yield "longer samples", "", lengths >= lengths[wrong].min(), False
    yield "shorter samples", "", lengths <= lengths[wrong].max(), False
    if one.per == "token":
        position = _positions(block)
        yield "the first token", "first token", position == 0, True
        yield "the last token", "last token", position == lengths - 1, True
        start = int(position[wrong].min())
        yield f"tokens from position {start} on", "", position >= start, True

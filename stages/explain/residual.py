"""The shape of an error that no fault reproduces: on which values it lies, and how it grows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.values import Values

# A shape explains an error that it leaves less than this part of.
LEFT = 1e-3
# What fits any error, since its bound is read off the errors: no shape to tell two apart by.
_BOUNDED = ("longer samples", "shorter samples", "tokens from position")
# What is a cohort's own in a sentence: counts in brackets, numbers, ids and quoted names.
_OWN = re.compile(r" \([^)]*\)|(?<=only at group )\S+|'[^']*'|\S*\d\S*")


def without_own(sentence: str) -> str:
    """A sentence without the numbers and names of its cohort, to tell kinds apart by.

    >>> without_own("only at rank 3 (4 of 8 samples)"), without_own("a constant factor of 1.37")
    ('only at rank *', 'a constant factor of *')
    """
    return _OWN.sub(lambda found: "" if found[0].startswith(" (") else "*", sentence)


def kind_of(shape: Iterable[str]) -> tuple[str, ...]:
    """What kind of error a shape is of, whatever its size and place.

    Args:
        shape: The clauses of `residual_shape`.
    """
    clauses = [one for one in shape if not any(bounded in one for bounded in _BOUNDED)]
    return tuple(sorted({without_own(one) for one in clauses}))


def residual_shape(block: Block, base: list[Values]) -> list[str]:
    """Say what the errors of a stage have in common.

    Args:
        block: The cohort.
        base: What was recorded and what it should be.

    Returns:
        Clauses to follow "the error is", the tightest first; empty where it has no shape.
    """
    found: list[str] = []
    for one in base:
        wrong = one.disagree & one.counts
        if not bool(wrong.any()):
            continue
        name = f"{one.field}: " if len(base) > 1 else ""
        shapes = [*_sizes(block, one, wrong), *_places(block, one, wrong)]
        found += [name + shape for shape in shapes[:3]]
    return found[:6]


def _sizes(block: Block, one: Values, wrong: Tensor) -> Iterator[str]:
    """How large: a constant factor or offset over all, or over each of some sets."""
    recorded, right = one.recorded[wrong], one.recomputed[wrong]
    if not bool(torch.isfinite(recorded).all()):
        bad = int((~torch.isfinite(recorded)).sum())
        yield f"NaN or infinity at {bad} of {len(recorded)}"
        return
    if not bool(torch.isfinite(right).all()):
        return
    if len(recorded) > 1 and bool((recorded == recorded[0]).all()):
        yield f"all that was recorded there is {float(recorded[0]):.6g}"
        return
    if len(recorded) > 1:
        everywhere = torch.zeros(len(recorded), dtype=torch.int64)
        factor, left = _factors(recorded, right, everywhere)
        if left < LEFT:
            yield f"a constant factor of {float(factor[0]):.6g}"
            return
        offset, left = _offsets(recorded, right, everywhere)
        if left < LEFT:
            yield f"a constant offset of {float(offset[0]):.6g}"
            return
    elif float(right[0]):
        yield f"a factor of {float(recorded[0] / right[0]):.6g}"
        return
    for what, index in _sets(block, one):
        mine = index[wrong]
        if len(torch.unique(mine)) == len(mine):
            continue  # one value a set fits anything
        factor, left = _factors(recorded, right, mine)
        if left < LEFT:
            used = factor[torch.unique(mine)]
            yield f"a factor for each {what}, from {used.min():.6g} to {used.max():.6g}"
            return
        offset, left = _offsets(recorded, right, mine)
        if left < LEFT:
            used = offset[torch.unique(mine)]
            yield f"an offset for each {what}, from {used.min():.6g} to {used.max():.6g}"
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


def _places(block: Block, one: Values, wrong: Tensor) -> Iterator[str]:
    """Where: kinds of values that hold every error, while others of the cohort hold none."""
    if one.per == "scalar":
        ranks = {place for place, bad in zip(one.places, wrong.tolist(), strict=True) if bad}
        if one.places and len(ranks) < len(set(one.places)):
            yield f"only at {', '.join(sorted(ranks)[:4])}"
        return
    for what, kind in _kinds(block, one):
        chosen = kind & one.counts
        inside, outside = wrong & chosen, wrong & ~chosen
        if (
            bool(inside.any())
            and not bool(outside.any())
            and int(chosen.sum()) < int(one.counts.sum())
        ):
            share = f"{int(inside.sum())} of {int(chosen.sum())}"
            yield f"only at {what} ({share} {one.per}s)"


def _kinds(block: Block, one: Values) -> Iterator[tuple[str, Tensor]]:
    packed, samples = block.packed, one.samples
    lengths = packed.lengths[samples].double()
    names = packed.table.column_names
    yield f"negative {one.field}", one.recomputed < 0
    yield f"positive {one.field}", one.recomputed > 0
    wrong = one.disagree & one.counts
    yield "one sample", samples == samples[wrong][0]
    ranks = packed.cohort_ranks[samples]
    yield f"rank {int(packed.ranks[int(samples[wrong][0])])}", ranks == ranks[wrong][0]
    if "group_id" in names and not packed.table["group_id"].null_count:
        groups = packed.groups[samples]
        group = packed.text("group_id", int(samples[wrong][0]))
        yield f"group {group}", groups == groups[wrong][0]
    yield "longer samples", lengths >= lengths[wrong].min()
    yield "shorter samples", lengths <= lengths[wrong].max()
    if one.per == "token":
        position = _positions(block)
        yield "the first token", position == 0
        yield "the last token", position == lengths - 1
        yield (
            f"tokens from position {int(position[wrong].min())} on",
            position >= int(position[wrong].min()),
        )

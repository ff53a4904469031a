"""Known ways to normalise rewards over the wrong samples."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Told,
    Tries,
    held,
    other_batch,
    setting,
    under,
)
from trajreplay.stages.faults.rewards import clipped, fault, normalised, shaped, wrong

_ISSUE = "https://github.com/"

_TOOL_ROWS = "the rows of a rank, {} at a time,"


def _by_named(column: str, what: str) -> Tries:
    def tries(block: Block) -> Iterable[Told]:
        if not held(block, "group_id", column):
            return
        packed = block.packed
        groups = packed.consumer_batches if column == "consumer_batch_id" else packed.micro_batches
        names = sorted(set(packed.table[column].to_pylist()))
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        plural = what.removesuffix("h") + "hes" if len(names) > 1 else what
        yield Told(_grouped(groups), f"{plural} {shown}")

    return tries


def _grouped(groups: Tensor) -> Variant:
    return Variant({"reward.grouping": "group"}, {"groups": groups})


def _by_batch(block: Block) -> Iterable[Told]:
    if setting(block, "reward.grouping") != "batch":
        yield Told(
            Variant({"reward.grouping": "batch"}), f"all {len(block.packed.lengths)} samples"
        )


def _by_rank(block: Block) -> Iterable[Told]:
    count = int(block.packed.cohort_ranks.max()) + 1
    if held(block, "group_id") and count > 1:
        yield Told(_grouped(block.packed.cohort_ranks), f"{count} ranks")


def _sizes(block: Block) -> list[int]:
    """Group sizes that a stride may have been taken for."""
    stated = setting(block, "reward.n_samples_per_prompt")
    sizes = {stated} if stated else set()
    if held(block, "group_id"):
        counts = torch.bincount(block.packed.groups)
        sizes |= {int(counts.max()), int(counts[counts > 0].mode().values)}
    return sorted(one for one in sizes if one > 1)


def _by_stride(block: Block) -> Iterable[Told]:
    for size in _sizes(block):
        changes = {"reward.grouping": "stride", "reward.n_samples_per_prompt": size}
        yield Told(Variant(changes), str(size))


def _by_stride_of_all(block: Block) -> Iterable[Told]:
    """Rows of all ranks after one another, as a driver holds them."""
    rows = torch.arange(len(block.packed.lengths))
    for size in _sizes(block):
        if held(block, "group_id"):
            yield Told(_grouped(rows // size), str(size))


def _by_position(block: Block) -> Iterable[Told]:
    """Samples of one prompt taken for those of the same number in every prompt."""
    if not held(block, "group_id"):
        return
    groups = block.packed.groups
    order = torch.argsort(groups, stable=True)
    starts = torch.bincount(groups).cumsum(0) - torch.bincount(groups)
    number = torch.empty_like(groups)
    number[order] = torch.arange(len(groups)) - starts[groups[order]]
    yield Told(_grouped(number))
    prompts = len(torch.unique(groups))
    if prompts > 1:
        yield Told(_grouped(torch.arange(len(groups)) % prompts), "")


def _unfilled_tail(block: Block) -> Iterable[Told]:
    """Statistics of full strides only: those of rows after the last one stay 0."""
    rows = torch.arange(len(block.packed.lengths))
    for size in _sizes(block):
        full = len(rows) // size * size
        if full == len(rows):
            continue

        def rewards(
            settings: Settings, raw: Tensor, groups: Tensor, full: int = full, size: int = size
        ) -> Tensor:
            given = shaped(block, settings, raw)
            found = normalised(block, settings, raw, rows // size)
            own = settings.reward
            tail = given / own.epsilon if own.divide_by_std else given
            return torch.where(rows < full, found, clipped(settings, tail))

        yield Told(wrong(rewards), str(size))


FAULTS = (
    fault(
        "grouped-by-consumer-batch",
        "streamed groups normalised as one block",
        "normalisation over {} instead of the semantic group",
        "how rewards are reshaped where samples arrive in batches; reward.grouping",
        _by_named("consumer_batch_id", "consumer batch"),
        "K-001",
        f"{_ISSUE}redai-studio/Relax/pull/65",
    ),
    fault(
        "grouped-by-batch",
        "the whole batch as one group",
        "normalisation over {} instead of the semantic group",
        "the fallback for a batch of unexpected size; reward.grouping",
        _by_batch,
        "K-001",
        "K-005",
        f"{_ISSUE}huggingface/trl/issues/3991",
    ),
    fault(
        "grouped-by-rank",
        "group statistics of what one rank holds",
        "normalisation over the samples of each of {} instead of the semantic group",
        "where rewards are gathered before they are normalised",
        _by_rank,
        "K-001",
    ),
    fault(
        "grouped-by-micro-batch",
        "group statistics of a forward pass",
        "normalisation over {} instead of the semantic group",
        "where rewards are normalised: before or after the split into micro-batches",
        _by_named("micro_batch_id", "micro-batch"),
    ),
    fault(
        "grouped-by-stride",
        "groups cut by position",
        f"normalisation over {_TOOL_ROWS} instead of the semantic group",
        "reshapes to (-1, n_samples_per_prompt); reward.grouping",
        _by_stride,
        "K-003",
        f"{_ISSUE}areal-project/AReaL/issues/1419",
    ),
    fault(
        "grouped-by-stride-of-all",
        "groups cut by position in the gathered batch",
        "normalisation over every {} samples in order of rank and row, not the semantic group",
        "reshapes to (-1, n_samples_per_prompt) after a gather; reward.grouping",
        _by_stride_of_all,
        "K-003",
    ),
    fault(
        "stride-tail",
        "rows after the last full stride keep statistics of 0",
        "normalisation over every {} samples in order, with mean and deviation 0 for the rest",
        "the loop over strides, where the number of samples is no multiple of the group size",
        _unfilled_tail,
        "K-003",
        f"{_ISSUE}areal-project/AReaL/issues/1419",
    ),
    fault(
        "grouped-by-position",
        "groups and repeats transposed",
        "normalisation over the samples of one number in each group, not over the group",
        "repeat against repeat_interleave; reshape(n, -1) against reshape(-1, n)",
        _by_position,
    ),
    fault(
        "grouped-by-prompt",
        "groups of a prompt where another grouping is stated",
        "normalisation over each semantic group",
        "reward.grouping",
        under(reward__grouping="group"),
    ),
    fault(
        "other-batch",
        "statistics of a step for those of a rollout, or the other way round",
        "normalisation with statistics {}",
        "layout.batch; whether rewards are normalised before a rollout is cut into steps",
        other_batch,
    ),
    fault(
        "per-fragment",
        "fan-out trajectories counted once per fragment",
        "normalisation of every fragment instead of every trajectory once",
        "reward.unit",
        under(reward__unit="sample"),
        "K-012",
        f"{_ISSUE}THUDM/slime/pull/2381",
    ),
)

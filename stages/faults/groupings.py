"""Known ways to normalise rewards over the wrong samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.faults.fault import (
    Told,
    Tries,
    WrongRewards,
    each,
    held,
    setting,
    under,
)
from trajreplay.stages.faults.rewards import fault, normalised
from trajreplay.stages.kernels import scatter_sum
from trajreplay.stages.variants import Variant

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
            settings: Settings,
            raw: Tensor,
            groups: Tensor,
            lengths: Tensor,
            full: int = full,
            size: int = size,
        ) -> Tensor:
            found = normalised(settings, raw, rows // size, lengths)
            tail = raw / settings.reward.epsilon if settings.reward.divide_by_std else raw
            return torch.where(rows < full, found, tail)

        yield Told(Variant(arithmetic=WrongRewards(rewards)), str(size))


def _without_some(block: Block) -> Iterable[Told]:
    """Samples that a filter took out before the statistics, and that were scored all the same."""
    packed = block.packed
    trained = scatter_sum(
        packed.weights,
        torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths),
        len(packed.lengths),
    )
    kinds_of = {
        "without a response": packed.lengths == 0,
        "without a trainable token": trained == 0,
    }
    if held(block, "truncated"):
        kinds_of["that were cut at the length limit"] = packed.scalars("truncated") != 0
    for what, out in kinds_of.items():
        if bool(out.any()) and not bool(out.all()):
            yield Told(Variant(arithmetic=WrongRewards(_excluding(out))), what)
    missing = _missing_members(block)
    if missing is not None:
        names = [packed.text("sample_id", one) for one in missing.nonzero().squeeze(1).tolist()[:3]]
        more = f" and {int(missing.sum()) - 3} more" if int(missing.sum()) > 3 else ""
        detail = f"{', '.join(map(str, names))}{more}"
        yield Told(Variant(arithmetic=WrongRewards(_excluding(missing))), detail)


def _excluding(out: Tensor) -> Callable[[Settings, Tensor, Tensor, Tensor], Tensor]:
    def rewards(settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        """Statistics of the samples that stayed; a sample that did not is scored with them."""
        reward = settings.reward
        kept = (~out).to(raw.dtype)
        size = int(groups.max()) + 1
        count = scatter_sum(kept, groups, size)[groups]
        mean = scatter_sum(raw * kept, groups, size)[groups] / count.clamp(1)
        centred = raw - mean if reward.baseline == "mean" else raw
        if not reward.divide_by_std:
            return centred
        squares = scatter_sum((raw - mean) ** 2 * kept, groups, size)[groups]
        spread = (squares / (count - reward.ddof).clamp(1)).sqrt()
        return centred / (spread + reward.epsilon)

    return rewards


def _missing_members(block: Block) -> Tensor | None:
    """(S,) bool. In each group that differs, the member without which the others are right.

    A group's mean of what was recorded is 0 over the members that were normalised.
    """
    reward = block.settings.reward
    if reward.baseline != "mean" or reward.unit != "sample" or not held(block, "group_id"):
        return None
    groups, recorded = block.packed.groups, block.packed.scalars("reward")
    size = int(groups.max()) + 1
    count = scatter_sum(torch.ones_like(recorded), groups, size)
    total = scatter_sum(recorded, groups, size)
    scale = scatter_sum(recorded.abs(), groups, size)
    off = (total.abs() > 1e-5 * scale) & (count > 2)
    if not bool(off.any()):
        return None
    left = (total[groups] - recorded).abs()  # what the others add up to
    best = torch.full((size,), torch.inf, dtype=left.dtype).scatter_reduce(0, groups, left, "amin")
    chosen = off[groups] & (left == best[groups])
    if not bool((best[off] <= 1e-5 * scale[off]).all()):
        return None
    first = torch.full((size,), len(groups)).scatter_reduce(
        0, groups, torch.where(chosen, torch.arange(len(groups)), len(groups)), "amin"
    )
    out = torch.zeros(len(groups), dtype=torch.bool)
    out[first[off]] = True
    return out


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
        "per-fragment",
        "fan-out trajectories counted once per fragment",
        "normalisation of every fragment instead of every trajectory once",
        "reward.unit",
        under(reward__unit="sample"),
        "K-012",
        f"{_ISSUE}THUDM/slime/pull/2381",
    ),
    fault(
        "lone",
        "a sample alone in its group",
        "normalisation that gives a sample alone in its group {}",
        "reward.lone",
        each(
            "reward.lone",
            ("zero", "keep", "nan"),
            {"zero": "zero", "keep": "its own reward", "nan": "NaN"}.__getitem__,
        ),
    ),
    fault(
        "missing-counted",
        "one missing reward makes its group NaN",
        "normalisation in which a missing reward makes its whole group NaN",
        "mean against nanmean; reward.missing",
        under(reward__missing="keep"),
        "K-018",
        f"{_ISSUE}modelscope/ms-swift/issues/8123",
    ),
    fault(
        "missing-excluded",
        "missing rewards left out",
        "normalisation without the rewards that are missing",
        "nanmean against mean; reward.missing",
        under(reward__missing="exclude"),
    ),
    fault(
        "without-members",
        "statistics of a group that lost members",
        "normalisation without the samples {}",
        "filters between scoring and normalisation",
        _without_some,
        "K-010",
        f"{_ISSUE}PrimeIntellect-ai/prime-rl/pull/2014",
    ),
)

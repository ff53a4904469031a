"""Known ways to normalise rewards with samples that are missing, alone or filtered out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Told,
    each,
    held,
    under,
)
from trajreplay.stages.faults.rewards import clipped, fault, shaped, wrong
from trajreplay.stages.kernels import scatter_sum

_ISSUE = "https://github.com/"


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
            yield Told(_excluding(block, out), what)
    missing = _missing_members(block)
    if missing is not None:
        names = [packed.text("sample_id", one) for one in missing.nonzero().squeeze(1).tolist()[:3]]
        more = f" and {int(missing.sum()) - 3} more" if int(missing.sum()) > 3 else ""
        detail = f"{', '.join(map(str, names))}{more}"
        yield Told(_excluding(block, missing), detail, int(missing.sum()))


def _excluding(block: Block, out: Tensor) -> Variant:
    """Statistics of the samples that stayed; a sample that did not is scored with them."""

    def rewards(settings: Settings, raw: Tensor, groups: Tensor) -> Tensor:
        reward, given = settings.reward, shaped(block, settings, raw)
        kept = (~out).to(given.dtype)
        size = int(groups.max()) + 1
        count = scatter_sum(kept, groups, size)[groups]
        mean = scatter_sum(given * kept, groups, size)[groups] / count.clamp(1)
        centred = given - mean if reward.baseline == "mean" else given
        if not reward.divide_by_std:
            return clipped(settings, centred)
        squares = scatter_sum((given - mean) ** 2 * kept, groups, size)[groups]
        spread = (squares / (count - reward.ddof).clamp(1)).sqrt()
        return clipped(settings, centred / (spread + reward.epsilon))

    return wrong(rewards)


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

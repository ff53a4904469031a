"""What is said of processed rewards, and of advantages, beside their verdict."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.compare import Look
from trajreplay.stages.report import Finding

# A mean below this part of the largest reward is that of rounding errors.
CENTRED = 1e-3


def warn_of_batch_rewards(block: Block) -> None:
    """Say where rewards of groups look normalised over all of them.

    For captures that give no raw rewards to recompute them from. Rewards that are centred in their
    groups are centred over whole groups together, but not the other way round.
    """
    packed, settings = block.packed, block.settings.reward
    if settings.grouping != "group" or settings.baseline != "mean":
        return
    if settings.unit != "sample" or settings.combination != "sum-then-normalise":
        return
    if packed.table["group_id"].null_count:
        return
    rewards, groups = packed.scalars("reward"), packed.groups
    means = torch.zeros(int(groups.max()) + 1, dtype=torch.float64)
    means.scatter_reduce_(0, groups, rewards, "mean", include_self=False)
    for cohort, (start, stop) in zip(block.cohorts, block.spans("reward"), strict=True):
        mine = rewards[start:stop]
        small = CENTRED * float(mine.abs().max())
        off = (means[groups[start:stop]].abs() > small).sum()
        if cohort.whole and bool(off) and abs(float(mine.mean())) <= small:
            cohort.report.findings.append(
                Finding(
                    "group.one-block",
                    "warning",
                    f"the rewards of {int(off)} samples do not centre in their groups, and all "
                    "together do: they look normalised over the batch or over other groups",
                    stage="reward.post_process",
                )
            )


def warn_of_constant_groups(block: Block, equal: Callable[[], Tensor], looks: list[Look]) -> None:
    """Say where training used a rounding error that the division by epsilon has made large.

    Args:
        block: The cohorts.
        equal: Gives (S,) bool, samples in groups of equal rewards that are divided.
        looks: How the rewards of each cohort compare.
    """
    if not any(look.undecided for look in looks):
        return
    constant = equal()
    for cohort, look, (start, stop) in zip(
        block.cohorts, looks, block.spans("reward"), strict=True
    ):
        count = int(constant[start:stop].sum())
        if look.undecided and count:
            cohort.report.findings.append(
                Finding(
                    "group.constant",
                    "warning",
                    f"{count} samples are in groups of equal rewards: their float32 deviation is a "
                    f"rounding error over epsilon, up to {look.max_abs_error:.3g} instead of 0",
                    stage="reward.post_process",
                )
            )


def warn_of_negative_variances(block: Block, recomputed: Tensor) -> None:
    """Say where advantages are NaN as a variance by one pass makes them that came out negative.

    Args:
        block: The cohorts.
        recomputed: (N,) float64. The advantages, by the exact variance.
    """
    own = block.settings.advantage
    if own.whiten == "none" or not (own.whiten_one_pass and own.whiten_scale):
        return
    recorded = block.packed.tokens("advantages")
    odd = recorded.isnan() & recomputed.isfinite() & block.packed.mask
    for cohort, (start, stop) in zip(block.cohorts, block.spans("advantages"), strict=True):
        if count := int(odd[start:stop].sum()):
            cohort.report.findings.append(
                Finding(
                    "advantage.negative-variance",
                    "warning",
                    f"{count} whitened tokens are NaN, and by an exact variance they are not: "
                    "E[x^2] - E[x]^2 in float32 can come out below -epsilon where advantages "
                    "differ little for their mean",
                    stage="advantage.estimate",
                )
            )

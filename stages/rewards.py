"""The stages reward.raw and reward.post_process of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.schema.policy import Tolerance
from trajreplay.stages.block import Block
from trajreplay.stages.capability import is_plain
from trajreplay.stages.compare import EXAMPLES, Look, compare_elements
from trajreplay.stages.compose import RewardInputs, evaluation_slack, processed_rewards
from trajreplay.stages.kernels import (
    constant_groups,
    group_rewards,
    group_rewards_error,
    half_ulp,
    scatter_sum,
    segment_sum,
)
from trajreplay.stages.outputs import echoed_looks
from trajreplay.stages.report import Divergence, Finding

_STAGE = "reward.post_process"
_EXACT = Tolerance(0.0, 0.0)
# A mean below this part of the largest reward is that of rounding errors.
CENTRED = 1e-3


def replay_reward_raw(block: Block) -> None:
    """Hold raw rewards against what was recorded beside them; a score is never recomputed in V1."""
    looks = echoed_looks(block, "reward.raw", "raw_reward", ("raw_reward", "raw_rewards"), _EXACT)
    for look, (start, stop) in zip(looks, block.spans("raw_reward"), strict=True):
        look.compared += stop - start
    # Where missing rewards are part of the arithmetic, one that is NaN is no fault.
    inputs = () if block.settings.reward.missing == "exclude" else ("raw_reward",)
    block.record("reward.raw", looks, inputs=inputs, noun="samples")


def replay_reward_post_process(block: Block) -> None:
    """Recompute the processed rewards from the raw ones, group by group."""
    packed, settings = block.packed, block.settings.reward
    raw, recorded = packed.scalars("raw_reward"), packed.scalars("reward")
    recomputed = _processed(block, raw)
    tolerance = block.tolerance("reward.post_process", "reward")
    dtype = block.dtypes.get("reward", "float32")

    def slack(samples: Tensor) -> Tensor:
        return (half_ulp(recomputed, dtype) + _error(block, raw, recomputed))[samples]

    compared = compare_elements(
        recorded,
        recomputed,
        packed.sample_bounds,
        tolerance,
        slack=slack,
        describe=lambda one, old, new: block.sample_divergence("reward", one, old, new),
    )
    looks = compared.looks
    if settings.grouping == "group":
        sizes = _group_size_looks(block, compared.disagree)
        looks = [look.merged(size) for look, size in zip(looks, sizes, strict=True)]
        if settings.divide_by_std:
            _warn_of_constant_groups(block, raw, looks)
    echoes = echoed_looks(
        block, "reward.post_process", "reward", ("reward", "rewards"), tolerance, recomputed, slack
    )
    looks = [look.merged(echo) for look, echo in zip(looks, echoes, strict=True)]
    if compared.disagree is not None:
        block.chained["reward"] = torch.where(compared.disagree, recomputed, recorded)
    block.record("reward.post_process", looks, outputs=("reward",), noun="samples")


def warn_of_batch_rewards(block: Block) -> None:
    """Say where rewards of groups look normalised over all of them.

    For captures that give no raw rewards to recompute them from. Rewards that are centred in their
    groups are centred over whole groups together, but not the other way round.
    """
    packed, settings = block.packed, block.settings.reward
    if settings.grouping != "group" or settings.baseline != "mean":
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
                    "reward.batch-mean",
                    "warning",
                    f"the rewards of {int(off)} samples do not centre in their groups, and all "
                    "together do: they look normalised over the batch or over other groups",
                    stage="reward.post_process",
                )
            )


def _processed(block: Block, raw: Tensor) -> Tensor:
    settings = block.settings.reward
    if not is_plain(_STAGE, block.settings):
        return processed_rewards(settings, raw, _inputs(block))
    if settings.grouping == "none":
        return raw
    return group_rewards(
        raw,
        block.packed.groups,
        baseline=settings.baseline,
        divide_by_std=settings.divide_by_std,
        ddof=settings.ddof,
        epsilon=settings.epsilon,
    )


def _error(block: Block, raw: Tensor, recomputed: Tensor) -> Tensor:
    """How far float32 may be off."""
    settings = block.settings.reward
    if not is_plain(_STAGE, block.settings):
        rounded = processed_rewards(settings, raw.float(), _inputs(block))
        return evaluation_slack(recomputed, rounded)
    if settings.grouping == "none":
        return half_ulp(raw, "float32")
    return group_rewards_error(
        raw,
        block.packed.groups,
        baseline=settings.baseline,
        divide_by_std=settings.divide_by_std,
        ddof=settings.ddof,
        epsilon=settings.epsilon,
    )


def _inputs(block: Block) -> RewardInputs:
    packed, settings = block.packed, block.settings.reward
    by_grouping = {
        "group": lambda: packed.groups,
        "consumer-batch": lambda: packed.consumer_batches,
        "stride": lambda: packed.strides(settings.n_samples_per_prompt or 1),
    }
    group = by_grouping.get(settings.grouping, lambda: packed.cohorts)()
    cut = settings.stop_properly_coef is not None
    truncated = packed.scalars("truncated") != 0 if cut else None
    trained = segment_sum(packed.weights, packed.offsets)
    return RewardInputs(group, packed.cohorts, packed.lengths, trained, truncated)


def _group_size_looks(block: Block, disagree: Tensor | None) -> list[Look]:
    """A group of another size than the settings say diverges: other samples were normalised.

    Samples that disagree are counted already.
    """
    expected = block.settings.reward.n_samples_per_prompt
    looks = [Look() for _ in block.cohorts]
    groups = block.packed.groups
    if expected is None or not len(groups):
        return looks
    others = torch.ones(len(groups)) if disagree is None else (~disagree).float()
    sizes = scatter_sum(torch.ones(len(groups)).double(), groups, int(groups.max()) + 1)
    uncounted = scatter_sum(others.double(), groups, len(sizes))
    first = torch.full((len(sizes),), len(groups)).scatter_reduce(
        0, groups, torch.arange(len(groups)), "amin"
    )
    for group in (sizes != expected).nonzero().squeeze(1).tolist():
        sample = int(first[group])
        index = int(
            torch.searchsorted(torch.tensor(block.packed.sample_bounds[1:]), sample, right=True)
        )
        look, place = looks[index], block.sample_divergence("", sample, 0.0, 0.0)
        look.mismatches += int(uncounted[group])
        if len(look.divergences) < EXAMPLES:
            look.divergences.append(
                Divergence(
                    "group_size", float(sizes[group]), float(expected), group_id=place.group_id
                )
            )
    return looks


def _warn_of_constant_groups(block: Block, raw: Tensor, looks: list[Look]) -> None:
    """Say where training used a rounding error that the division by epsilon has made large."""
    if not any(look.undecided for look in looks):
        return
    constant = constant_groups(raw, block.packed.groups)
    for cohort, look, (start, stop) in zip(
        block.cohorts, looks, block.spans("raw_reward"), strict=True
    ):
        count = int(constant[start:stop].sum())
        if look.undecided and count:
            cohort.report.findings.append(
                Finding(
                    "reward.constant-group",
                    "warning",
                    f"{count} samples are in groups of equal rewards: their float32 deviation is a "
                    f"rounding error over epsilon, up to {look.max_abs_error:.3g} instead of 0",
                    stage="reward.post_process",
                )
            )

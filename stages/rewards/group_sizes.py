"""Whether every prompt has as many samples, or trajectories, as the settings say."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.compare import EXAMPLES, Look
from trajreplay.stages.kernels import scatter_sum
from trajreplay.stages.report import Divergence, Finding


def group_size_looks(block: Block, disagree: Tensor | None) -> list[Look]:
    """A group of another size than the settings say diverges: other samples were normalised.

    Args:
        block: The block.
        disagree: (S,) bool. Samples that disagree, which are counted already; None if none do.

    Returns:
        A look per cohort.
    """
    settings, packed = block.settings.reward, block.packed
    expected = settings.n_samples_per_prompt
    looks = [Look() for _ in block.cohorts]
    groups = packed.strides(expected or 1) if settings.grouping == "stride" else packed.groups
    if expected is None or not len(groups):
        return looks
    count = int(groups.max()) + 1
    counted = torch.ones(len(groups)) if disagree is None else (~disagree).float()
    uncounted = scatter_sum(counted.double(), groups, count)
    first = torch.full((count,), len(groups)).scatter_reduce(
        0, groups, torch.arange(len(groups)), "amin"
    )
    sizes = _members(block, groups, count)
    edges = torch.tensor(packed.sample_bounds[1:])
    for group in (sizes != expected).nonzero().squeeze(1).tolist():
        sample = int(first[group])
        look = looks[int(torch.searchsorted(edges, sample, right=True))]
        place = block.sample_divergence("", sample, 0.0, 0.0)
        look.mismatches += int(uncounted[group])
        if len(look.divergences) < EXAMPLES:
            look.divergences.append(
                Divergence(
                    "group_size",
                    float(sizes[group]),
                    float(expected),
                    sample_id=place.sample_id,
                    group_id=place.group_id,
                )
            )
    return looks


def odd_group(look: Look) -> Finding | None:
    """The finding of a look at the sizes of groups that found odd ones."""
    if not look.divergences:
        return None
    first = look.divergences[0]
    more = f" and {len(look.divergences) - 1} more" if len(look.divergences) > 1 else ""
    message = (
        f"group {first.group_id}{more} has {first.recorded:g} members, and "
        f"reward.n_samples_per_prompt is {first.recomputed:g}"
    )
    check = "group.short" if first.recorded < first.recomputed else "group.large"
    stage = "reward.post_process"
    return Finding(check, "error", message, stage=stage, sample_id=first.sample_id)


def _members(block: Block, groups: Tensor, count: int) -> Tensor:
    """(G,) float64. The samples of each group or, where those are its fragments, trajectories."""
    if block.settings.reward.unit == "sample":
        return scatter_sum(torch.ones(len(groups)).double(), groups, count)
    pairs = torch.unique(torch.stack([groups, block.packed.trajectories]), dim=1)
    return scatter_sum(torch.ones(pairs.shape[1]).double(), pairs[0], count)

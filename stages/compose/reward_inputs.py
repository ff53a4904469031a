"""What rewards are processed with, and trajectories cut into fragments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from trajreplay.schema import RewardSettings, StageError
from trajreplay.stages.kernels.segments import scatter_sum

# What a trajectory has of them is what its fragments have together; the rest they share.
_ADDED = ("lengths", "trained", "remaining", "totals", "turns", "penalty", "penalty_error")


@dataclass(frozen=True)
class RewardInputs:
    """What rewards are processed with, besides the raw ones.

    Args:
        group: (S,) int64. Which samples share a baseline.
        batch: (S,) int64. Which samples are of one cohort.
        lengths: (S,) int64. Response tokens.
        trained: (S,) float. Trainable ones.
        trajectory: (S,) int64. Which samples are fragments of one; None where each is its own.
        step: (S,) int64. The place of each fragment in its trajectory; None where none is asked.
        truncated: (S,) bool. Responses cut at the length limit; None where no setting asks.
        greedy: (S,) float. Rewards of the greedy responses; None where no setting asks.
        kept: (S,) float. Baselines that the trainer kept; None where no setting asks.
        prompt: (S,) int64. Which samples are of one prompt; None where that is `group`.
        totals: (S,) int64. Prompt and response tokens; None where no setting asks.
        turns: (S,) float. Turns of the model; None where no setting asks.
        remaining: (S,) float. Trained tokens that the loss keeps; None where no setting asks.
        first_message: (S,) float. Tokens of the first message of the model; None likewise.
        penalty: (S,) float. What each pays for its KL; None where no setting asks.
        penalty_error: (S,) float64. What that may be off by in float32; 0 if not given.
    """

    group: Tensor
    batch: Tensor
    lengths: Tensor
    trained: Tensor
    trajectory: Tensor | None = None
    step: Tensor | None = None
    truncated: Tensor | None = None
    greedy: Tensor | None = None
    kept: Tensor | None = None
    prompt: Tensor | None = None
    totals: Tensor | None = None
    turns: Tensor | None = None
    remaining: Tensor | None = None
    first_message: Tensor | None = None
    penalty: Tensor | None = None
    penalty_error: Tensor | None = None


def of_trajectories(given: RewardInputs, trajectory: Tensor) -> tuple[RewardInputs, Tensor, Tensor]:
    """The inputs of one sample a trajectory, its first fragment, and the trajectory of each.

    Raises:
        StageError: One has fragments in several groups.
    """
    member, first = numbered_trajectories(given.group, trajectory)
    count = len(first)
    found = {one.name: getattr(given, one.name) for one in fields(given)}
    there = {name: one for name, one in found.items() if one is not None}
    made = {
        name: scatter_sum(one.double(), member, count) if name in _ADDED else one[first]
        for name, one in there.items()
        if name not in ("trajectory", "step")
    }
    if "truncated" in there:
        made["truncated"] = scatter_sum(there["truncated"].double(), member, count) > 0
    return RewardInputs(**made), first, member


def numbered_trajectories(group: Tensor, trajectory: Tensor) -> tuple[Tensor, Tensor]:
    """Number trajectories from 0: that of each fragment, and the first fragment of each.

    Raises:
        StageError: One has fragments in several groups: no statistic is of the whole of it.
    """
    _, member = torch.unique(trajectory, return_inverse=True)
    count = int(member.max()) + 1 if len(member) else 0
    place = torch.arange(len(member))
    first = torch.full((count,), len(member)).scatter_reduce(0, member, place, "amin")
    apart = member[group != group[first][member]].unique().numel()
    if apart:
        raise StageError(
            f"{apart} of {count} trajectories have fragments in several groups, expected each in "
            "one",
            hint="Give all fragments of a trajectory the group of its prompt.",
        )
    return member, first


def cells(group: Tensor, step: Tensor) -> Tensor:
    """Groups divided by the step of each sample."""
    _, place = torch.unique(step, return_inverse=True)
    cells: Tensor = group * (int(place.max()) + 1 if len(place) else 1) + place
    return cells


def costs_of(settings: RewardSettings, given: RewardInputs) -> list[Tensor]:
    """(S,) each. What every sample pays for, in the order of the weights."""
    known: dict[str, Callable[[], Tensor | None]] = {
        "output": lambda: given.trained,
        "input": lambda: None if given.totals is None else given.totals - given.trained,
        "turns": lambda: given.turns,
    }
    costs = [known[name]() for name in settings.costs]
    return [one for one in costs if one is not None]

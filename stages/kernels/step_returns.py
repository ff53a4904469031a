"""Returns over the steps of an agent: fragments of a trajectory, each with a reward of its own."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.options import in_dtype_of
from trajreplay.stages.kernels.scans import linear_scan
from trajreplay.stages.kernels.segments import check_shapes


def step_returns(
    rewards: Tensor, trajectory_index: Tensor, step_index: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """Sum the rewards of a trajectory from each of its steps on.

        R_k = sum_{j >= k} gamma^(j-k) r_j      over the steps of one trajectory

    Args:
        rewards: (S,) float, r. The reward of each step.
        trajectory_index: (S,) int64. The trajectory of each step, any numbers in any order.
        step_index: (S,) int64, k. Its place there, from 0.
        gamma: What a step discounts; 0 leaves each its own reward. Dimensionless.

    Returns:
        (S,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length, or the steps of a trajectory are not 0, 1, 2, ...
            each once.

    Conventions:
        Runs in float64. A missing step would be missing from the returns of those before it, and
        is refused. A NaN reaches the steps before it.

    Source:
        Sutton and Barto 2018, Reinforcement Learning, section 3.3, with a step for an action.

    >>> trajectory_index, step_index = torch.tensor([5, 5, 7]), torch.tensor([1, 0, 0])
    >>> step_returns(torch.tensor([1.0, 0.0, 2.0]), trajectory_index, step_index)
    tensor([1., 1., 2.])
    """
    kernel = "step_returns"
    check_shapes(
        kernel,
        rewards=(rewards, "S"),
        trajectory_index=(trajectory_index, "S"),
        step_index=(step_index, "S"),
    )
    order, offsets = in_steps(trajectory_index, step_index)
    terms = rewards.double()[order]
    result = torch.empty_like(terms)
    result[order] = linear_scan(terms, torch.full_like(terms, gamma), offsets)
    return in_dtype_of(rewards, result)


def in_steps(trajectory_index: Tensor, step_index: Tensor) -> tuple[Tensor, Tensor]:
    """Order steps by trajectory and place: (S,) where each is found, and where each begins.

    Raises:
        StageError: The steps of a trajectory are not 0, 1, 2, ... each once.
    """
    _, member = torch.unique(trajectory_index, return_inverse=True)
    order = step_index.argsort(stable=True)
    order = order[member[order].argsort(stable=True)]
    lengths = torch.bincount(member)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    expected = torch.arange(len(order), device=offsets.device) - offsets[:-1][member[order]]
    odd = step_index[order] != expected
    if bool(odd.any()):
        trajectories = torch.unique(member[order][odd]).numel()
        raise StageError(
            f"step_returns: the steps of {trajectories} of {lengths.numel()} trajectories are not "
            "0, 1, 2, ... each once",
            hint="Capture every fragment of a trajectory, with its place in it.",
        )
    return order, offsets

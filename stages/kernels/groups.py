"""The groups that samples share statistics with, and which of them are constant."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.stages.kernels.segments import check_shapes


@dataclass(frozen=True)
class Groups:
    """The groups of S samples, numbered from 0: G of them.

    Args:
        member: (S,) int64. The group of each sample.
        size: (G,) float64. The number of samples of each group, never 0.
    """

    member: Tensor
    size: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """Sum (S,) float64 values over each group, in the order of the samples."""
        return torch.zeros_like(self.size).index_add_(0, self.member, values)

    def mean(self, values: Tensor) -> Tensor:
        """Average (S,) float64 values over each group."""
        return self.sum(values) / self.size

    def least(self, values: Tensor) -> Tensor:
        """Find the smallest (S,) float64 value of each group; NaN where there is one."""
        return torch.zeros_like(self.size).scatter_reduce_(
            0, self.member, values, "amin", include_self=False
        )


def groups_of(group_index: Tensor) -> Groups:
    """Number the groups of samples from 0.

    Args:
        group_index: (S,) int64. The group of each sample, any numbers in any order.

    Returns:
        The groups, in the order of their numbers.

    >>> groups_of(torch.tensor([9, 7, 9])).size
    tensor([1., 2.], dtype=torch.float64)
    """
    _, member, size = torch.unique(group_index, return_inverse=True, return_counts=True)
    return Groups(member, size.double())


def constant_groups(raw_rewards: Tensor, group_index: Tensor) -> Tensor:
    """Mark the samples whose group has exactly equal rewards.

        y_i = all_{j in g} (r_j = r_i)      with g the group of i

    Args:
        raw_rewards: (S,) float. One reward per sample.
        group_index: (S,) int64. The group of each sample, any numbers in any order.

    Returns:
        (S,) bool.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        Compared as given: a tolerance would depend on the dtype. A group of one is constant, one
        with a NaN is not.

    Source:
        The definition.

    >>> constant_groups(torch.tensor([0.3, 0.3, 0.5, 0.6]), torch.tensor([0, 0, 1, 1]))
    tensor([ True,  True, False, False])
    """
    check_shapes("constant_groups", raw_rewards=(raw_rewards, "S"), group_index=(group_index, "S"))
    groups = groups_of(group_index)
    raw = raw_rewards.double()
    least = groups.least(raw)[groups.member]
    return groups.least((raw == least).double())[groups.member] == 1.0

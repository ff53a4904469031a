"""The groups that samples share statistics with, and which of them are constant."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.stages.kernels.segments import check_shapes

_SPARSE = 4  # how many more numbers than samples may be counted


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
    if group_index.numel():
        least, most = (int(one) for one in group_index.aminmax())
        if most - least < _SPARSE * group_index.numel():  # counted, and not sorted
            places = group_index - least
            counts = torch.bincount(places)
            there = counts > 0
            numbers = there.cumsum(0) - 1
            return Groups(numbers[places], counts[there].double())
    _, member, size = torch.unique(group_index, return_inverse=True, return_counts=True)
    return Groups(member, size.double())


def constant_groups(raw_rewards: Tensor, group_index: Tensor, *, within: float = 0.0) -> Tensor:
    """Mark the samples whose group has equal rewards.

        y_i = all_{j in g} (r_j = r_i)  or  s_g <= within      with g the group of i
        s_g = sqrt(sum_{j in g} (r_j - mean_g(r))^2 / (n_g - 1))

    Args:
        raw_rewards: (S,) float. One reward per sample.
        group_index: (S,) int64. The group of each sample, any numbers in any order.
        within: Highest deviation of rewards that count as equal. Unit of `raw_rewards`.

    Returns:
        (S,) bool.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        Compared as given, within 0: a tolerance would depend on the dtype. Deviations run in
        float64. A group of one is constant, one with a NaN is not. slime's filter keeps groups of
        a deviation above 1e-6; NeMo-RL's those of one that float32 does not make 0, which a group
        of equal rewards may pass.

    Source:
        Dynamic sampling: Yu et al. 2025, DAPO, section 3.2, arXiv:2503.14476.

    >>> constant_groups(torch.tensor([0.3, 0.3, 0.5, 0.6]), torch.tensor([0, 0, 1, 1]))
    tensor([ True,  True, False, False])
    """
    check_shapes("constant_groups", raw_rewards=(raw_rewards, "S"), group_index=(group_index, "S"))
    groups = groups_of(group_index)
    raw = raw_rewards.double()
    least = groups.least(raw)
    constant = groups.least((raw == least[groups.member]).double()) == 1.0
    if within > 0.0:
        shifted = raw - torch.where(torch.isfinite(least), least, 0.0)[groups.member]
        centred = shifted - groups.mean(shifted)[groups.member]
        variance = groups.sum(centred**2) / (groups.size - 1.0).clamp(min=1.0)
        constant |= variance.sqrt() <= within
    return constant[groups.member]

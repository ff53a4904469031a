"""The trained tokens of sets of samples, micro-batches for most, and their order in each."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.masked import spread
from trajreplay.stages.kernels.segments import check_segments, check_shapes


@dataclass(frozen=True)
class TokenSets:
    """The n trained tokens among N, and the set of each.

    Args:
        samples: (S,) int64. The set of each sample.
        trained: (n,) int64. Where they are.
        member: (n,) int64. The set of each.
        count: (K,) float64. How many each set has.
        tokens: N.
    """

    samples: Tensor
    trained: Tensor
    member: Tensor
    count: Tensor
    tokens: int

    @classmethod
    def of(
        cls, kernel: str, mask: Tensor, offsets: Tensor, index: Tensor | None, size: int
    ) -> "TokenSets":
        """Find the trained tokens of each set.

        Args:
            kernel: Who asks, for the message.
            mask: (N,) bool, integer or float. Not 0 where a token counts.
            offsets: (S+1,) int64. Where each sample begins, and N.
            index: (S,) int64. The set of each sample; None if all are set 0.
            size: How many sets there are, K.

        Returns:
            The sets, in the order of their numbers.

        Raises:
            StageError: The inputs differ in length, `offsets` do not cover them, or an index lies
                outside.

        >>> TokenSets.of("demo", torch.tensor([1, 0, 1]), torch.tensor([0, 3]), None, 1).trained
        tensor([0, 2])
        """
        check_segments(kernel, mask, offsets)
        lengths = offsets.diff()
        found = torch.zeros_like(lengths) if index is None else index
        check_shapes(kernel, offsets=(lengths, "S"), index=(found, "S"))
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < size:
            raise StageError(
                f"{kernel}: index runs from {int(found.min())} to {int(found.max())}, "
                f"expected 0 to {size - 1}",
                hint="Number the micro-batches from 0.",
            )
        trained = mask.bool().nonzero().squeeze(1)
        member = spread(found, offsets)[trained]
        count = torch.bincount(member, minlength=size).double()
        return cls(found, trained, member, count, mask.numel())

    def chosen(self, values: Tensor) -> Tensor:
        """Take the trained of (N,) tokens, as float64."""
        return values[self.trained].double()

    def scatter(self, flags: Tensor) -> Tensor:
        """Put (n,) flags back among N tokens, False elsewhere."""
        everywhere = torch.zeros(self.tokens, dtype=torch.bool, device=flags.device)
        everywhere[self.trained] = flags
        return everywhere

    def spread(self, values: Tensor) -> Tensor:
        """Repeat what each of K sets has over its n tokens."""
        return values[self.member]

    def everywhere(self, values: Tensor, offsets: Tensor) -> Tensor:
        """Repeat what each of K sets has over its tokens, masked ones too: (N,)."""
        return spread(values[self.samples], offsets)

    def sum(self, chosen: Tensor) -> Tensor:
        """Sum (n,) float64 values over each set."""
        return torch.zeros_like(self.count).index_add_(0, self.member, chosen)

    def mean(self, chosen: Tensor) -> Tensor:
        """Average (n,) float64 values over each set; 0 where it has none."""
        return self.sum(chosen) / self.count.clamp(min=1.0)

    def least(self, chosen: Tensor) -> Tensor:
        """The least of (n,) values in each set; infinity where it has none."""
        found = torch.full_like(self.count, torch.inf)
        return found.scatter_reduce_(0, self.member, chosen, "amin")

    def rank(self, chosen: Tensor, *, descending: bool = False) -> Tensor:
        """Number (n,) values from the first of each set, 0; equal ones as they come. int64."""
        order = self._order(chosen, descending=descending)
        rank = torch.empty_like(order)
        rank[order] = self._place(order)
        return rank

    def rows(self, chosen: Tensor, rank: Tensor) -> Tensor:
        """Lay (n,) values out by set and in the order of `rank`, infinity after them: (K, L)."""
        width = int(self.count.max()) if self.count.numel() else 0
        rows = chosen.new_full((self.count.numel(), width), torch.inf)
        rows[self.member, rank] = chosen
        return rows

    def _order(self, chosen: Tensor, *, descending: bool) -> Tensor:
        by_value = torch.sort(chosen, stable=True, descending=descending).indices
        return by_value[torch.sort(self.member[by_value], stable=True).indices]

    def _place(self, order: Tensor) -> Tensor:
        first = self.count.cumsum(0).sub(self.count).long()
        return torch.arange(order.numel(), device=order.device) - self.spread(first)[order]


def number_of_sets(index: Tensor | None) -> int:
    """How many sets (S,) samples are numbered into; None is one set of all.

    >>> number_of_sets(torch.tensor([0, 2, 1]))
    3
    """
    return 1 if index is None or not index.numel() else int(index.max()) + 1

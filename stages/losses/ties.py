"""What a loss may be off by where rounding decides which tokens of a micro-batch pay a penalty."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.stages.kernels import scatter_sum, segment_sum
from trajreplay.stages.kernels.gates import Undecided
from trajreplay.stages.kernels.sets import number_of_sets


@dataclass(frozen=True)
class Ties:
    """Bounds of what samples may be off by, each alone and together.

    Of a micro-batch k tokens pay: other k than those computed move the sum over any of its samples
    by no more than all that is undecided there, and by no more than k times the largest of it.

    Args:
        total: (S,) float64. What is undecided of the mean of each sample.
        largest: (S,) float64. The most that one of its tokens adds to that.
        allowed: (S,) float64. How many tokens of its micro-batch pay.
        batches: (S,) int64. Its micro-batch.
    """

    total: Tensor
    largest: Tensor
    allowed: Tensor
    batches: Tensor

    @classmethod
    def of(
        cls, found: Undecided, offsets: Tensor, divisors: Tensor, batches: Tensor | None
    ) -> Ties:
        """Those of samples.

        Args:
            found: What is undecided.
            offsets: (S+1,) int64. Where the tokens of each sample begin.
            divisors: (S,) float64. What the mean of each divides by.
            batches: (S,) int64. The micro-batch of each; None if all are one.
        """
        samples = len(divisors)
        owners = torch.arange(samples).repeat_interleave(offsets.diff())
        largest = torch.zeros(samples, dtype=torch.float64)
        largest.scatter_reduce_(0, owners, found.penalty, "amax")
        own = torch.zeros(samples, dtype=torch.int64) if batches is None else batches
        total = segment_sum(found.penalty, offsets)
        return cls(total / divisors, largest / divisors, found.allowed, own)

    @property
    def alone(self) -> Tensor:
        """(S,) float64. What the mean of each sample may be off by."""
        return torch.minimum(self.total, self.allowed * self.largest)

    def together(self, samples: Tensor, factors: Tensor) -> Tensor:
        """(K,) float64. What samples add to what a sum over them may be off by.

        Args:
            samples: (K,) int64. The samples.
            factors: (K,) float64. What the mean of each is multiplied by in the sum.
        """
        batches, factors = self.batches[samples], factors.abs()
        size = number_of_sets(batches)
        own = self.alone[samples] * factors
        largest = torch.zeros(size, dtype=torch.float64)
        one = self.allowed[samples] * self.largest[samples] * factors
        largest.scatter_reduce_(0, batches, one, "amax")
        total = scatter_sum(own, batches, size)
        share = torch.minimum(largest / torch.where(total > 0.0, total, 1.0), torch.ones(()))
        return own * share[batches]

"""The likelihood of good samples in a policy loss: a mean over each micro-batch of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.kernels import accumulation_factor, scatter_sum, segment_sum
from trajreplay.stages.kernels.sets import number_of_sets

NLL = "nll_loss"


@dataclass(frozen=True)
class Likelihood:
    """What a loss adds for samples that scored, which no other divisor of the loss divides.

    Args:
        coef: Its coefficient in the loss.
        parts: (S,) float64. What each sample adds to the mean of its micro-batch. Nat.
        errors: (S,) float64. How far float32 may be off. Nat.
    """

    coef: float
    parts: Tensor
    errors: Tensor

    @classmethod
    def of(cls, block: Block, log_probs: Tensor, weights: Tensor, batches: Tensor) -> Likelihood:
        """That of a block: the mean of -log pi over trained tokens of samples that scored.

        Args:
            block: The cohorts.
            log_probs: (N,) float64. Of the current policy.
            weights: (N,) float64. 1 for the tokens that are summed up.
            batches: (S,) int64. The micro-batch of each sample.
        """
        packed = block.packed
        good = (packed.scalars("raw_reward") > 0.0).repeat_interleave(packed.lengths)
        weights = weights * good.double()
        tokens = segment_sum(weights, packed.offsets)
        counts = scatter_sum(tokens, batches, number_of_sets(batches))[batches]
        known = torch.where(weights != 0.0, log_probs, 0.0)  # what is masked may be NaN
        sums, sizes = (segment_sum(one, packed.offsets) for one in (known, known.abs()))
        divided = counts.clamp(1.0)
        return cls(
            block.settings.loss.nll_coef,
            -sums / divided,
            accumulation_factor(counts + 2.0) * sizes / divided,
        )

    @property
    def scalars(self) -> tuple[str, ...]:
        """The scalars that it is in: samples have no part of these by themselves."""
        return ("loss", NLL)

    def added(self, name: str, samples: Tensor) -> tuple[float, float]:
        """What it adds to a scalar over samples, and how far that may be off.

        Args:
            name: The scalar.
            samples: (K,) int64. Packed sample numbers.
        """
        factor = {"loss": self.coef, NLL: 1.0}.get(name, 0.0)
        value, error = (float(one[samples].sum()) for one in (self.parts, self.errors))
        return factor * value, abs(factor) * error

"""What recorded means of a loss divide by: samples, tokens, micro-batches, or a constant."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from trajreplay.schema import LossSettings
from trajreplay.schema.entry import Output
from trajreplay.stages.kernels import scatter_sum
from trajreplay.stages.kernels.sets import number_of_sets


class Denominators:
    """What means over samples of a block divide by.

    Args:
        settings: The loss in force.
        trained: (S,) float64. Trained tokens of each sample.
        counted: (S,) float64. Those of them that a mean divides by.
        trajectories: (S,) int64. The trajectory of each; None where a mean divides by samples.
        micro_batches: (S,) int64. The micro-batch of each; None where none was read.
    """

    def __init__(
        self,
        settings: LossSettings,
        trained: Tensor,
        counted: Tensor,
        trajectories: Tensor | None,
        micro_batches: Tensor | None,
    ) -> None:
        self._settings = settings
        self._trained, self._tokens = trained, counted
        self._trajectories, self._micro_batches = trajectories, micro_batches

    def by_batch(self, output: Output) -> bool:
        """Whether an output is a mean over the means of micro-batches."""
        averaged = self._settings.mean_over == "micro-batch" and output.reduction != "sum"
        averaged &= self._micro_batches is not None
        return averaged and output.scope in ("rank", "global")

    @cached_property
    def shares(self) -> Tensor:
        """(S,) What each sample is multiplied by in a sum over the means of micro-batches."""
        counts = scatter_sum(self._counts, self._batches, number_of_sets(self._batches))
        divided = torch.where(counts == 0.0, 1.0, counts) + self._settings.count_epsilon
        return (self._batch_weights / divided)[self._batches]

    @property
    def _batches(self) -> Tensor:
        assert self._micro_batches is not None  # the capability matrix asks for them
        return self._micro_batches

    @cached_property
    def _batch_weights(self) -> Tensor:
        """(K,) What each micro-batch counts in a mean over them."""
        size, weight = number_of_sets(self._batches), self._settings.micro_batch_weight
        if weight == "equal":
            return torch.ones(size, dtype=torch.float64)
        given = torch.ones_like(self._trained) if weight == "rows" else self._trained
        return scatter_sum(given, self._batches, size)

    @cached_property
    def _counts(self) -> Tensor:
        """(S,) What each sample adds to what a mean divides by."""
        settings, tokens = self._settings, self._tokens
        if settings.aggregation == "token-mean":
            return tokens.clamp(min=1.0) if settings.token_count == "at-least-one" else tokens
        if settings.denominator_rows == "all":
            return torch.ones_like(tokens)
        left = tokens > 0.0
        if settings.denominator_rows == "kept":
            left |= self._trained == 0.0
        return left.double()

    def count(self, samples: Tensor) -> float:
        """How many samples, tokens or trajectories packed samples are."""
        if self._trajectories is not None:
            counted = samples[self._counts[samples] > 0.0]
            return float(len(torch.unique(self._trajectories[counted])))
        return float(self._counts[samples].sum())

    def _whole(self, output: Output, samples: Tensor) -> float:
        """What the mean of an output over packed samples divides by."""
        settings = self._settings
        if self.by_batch(output):
            return float(self._batch_weights[torch.unique(self._batches[samples])].sum())
        if settings.aggregation == "constant-norm":
            rows = self.count(samples) if settings.constant_norm_by_rows else 1.0
            return float(settings.constant_norm or torch.nan) * rows
        return self.count(samples)

    def divisor(self, output: Output, samples: Tensor) -> float:
        """What the sum over the samples of an output was divided by; NaN where by nothing."""
        settled = self._settings.aggregation == "constant-norm" and not self.by_batch(output)
        if not settled and output.reduction == "sum":
            return 1.0
        epsilon = 0.0 if settled or self.by_batch(output) else self._settings.count_epsilon
        if not settled and output.denominator is not None:
            return output.denominator + epsilon if output.denominator else torch.nan
        # The mean of nothing is recorded as the sum of nothing.
        return (self._whole(output, samples) or 1.0) + epsilon

    def known(self, output: Output, samples: Tensor, every: Tensor) -> set[float]:
        """The denominators that an output may state.

        Args:
            output: The output.
            samples: (K,) int64. The packed samples that it covers.
            every: (L,) int64. Those of its cohort.
        """
        return {self._whole(output, samples), self._whole(output, every)}

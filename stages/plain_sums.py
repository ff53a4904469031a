"""Loss terms summed as a trainer sums them: in float32, sample by sample, for `--exact`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trajreplay.schema.entry import Output
from trajreplay.stages.kernels import MaskedMean


def plain_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """(S,) float32. The sum of each sample's tokens, as `sum()` of its float32 tensor gives it."""
    spans = pairwise(offsets.tolist())
    return torch.stack([values[start:stop].float().sum() for start, stop in spans])


class Float32Losses:
    """The means and numerators of every sample in float32, and sums of them in order.

    Args:
        means: By field, of each sample.
        by_mean: By field, whether a sample enters a total with its mean over tokens, not with
            its sum.
    """

    def __init__(self, means: dict[str, MaskedMean], by_mean: dict[str, bool]) -> None:
        self._means, self._by_mean = means, by_mean

    def samples(self, name: str, chosen: Tensor, output: Output) -> Tensor:
        """(K,) float64. What a value a sample would be."""
        one = self._means[name]
        values = one.numerator if output.reduction == "sum" else one.mean
        return (values[chosen] * output.scale).double()

    def total(self, name: str, chosen: Tensor, shares: Tensor | None) -> float:
        """The sum over samples, one added after the other; each times its share, if there are."""
        one = self._means[name]
        values = one.mean if self._by_mean[name] else one.numerator
        if shares is not None:
            values = values * shares.float()
        sums = np.add.accumulate(values[chosen].numpy(), dtype=np.float32)
        return float(sums[-1]) if len(sums) else 0.0

    @staticmethod
    def scaled(total: float, scale: float, divisor: float) -> float:
        """A total as it is recorded: with its factor, and divided."""
        return float(np.float32(total) * np.float32(scale) / np.float32(divisor))

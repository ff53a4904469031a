"""Loss terms summed as a trainer sums them: in one dtype and order, sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trajreplay.schema.entry import Output
from trajreplay.stages.kernels import MaskedMean


def _first_to_last(values: Tensor) -> Tensor:
    sums = np.add.accumulate(values.numpy())
    return torch.tensor(sums[-1] if len(sums) else 0.0, dtype=values.dtype)


# Ways to add up the tokens of a sample; samples are added one after the other, the last first
# where tokens are.
ORDERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "as torch takes them": torch.sum,
        "first to last": _first_to_last,
        "last to first": lambda values: _first_to_last(values.flip(0)),
    }
)


def plain_sums(
    values: Tensor,
    offsets: Tensor,
    dtype: torch.dtype = torch.float32,
    order: str = "as torch takes them",
) -> Tensor:
    """(S,) in the dtype. The sum of each sample's tokens, taken in it and in one of the orders."""
    spans = pairwise(offsets.tolist())
    return torch.stack([ORDERS[order](values[start:stop].to(dtype)) for start, stop in spans])


class PlainLosses:
    """The means and numerators of every sample in one dtype, and sums of them in order.

    Args:
        means: By field, of each sample, in the dtype.
        by_mean: By field, whether a sample enters a total with its mean over tokens, not with
            its sum.
        order: One of `ORDERS`.
    """

    def __init__(
        self,
        means: dict[str, MaskedMean],
        by_mean: dict[str, bool],
        order: str = "as torch takes them",
    ) -> None:
        self._means, self._by_mean, self._order = means, by_mean, order

    def samples(self, name: str, chosen: Tensor, output: Output) -> Tensor:
        """(K,) float64. What a value a sample would be."""
        one = self._means[name]
        values = one.numerator if output.reduction == "sum" else one.mean
        return (values[chosen] * output.scale).double()

    def total(self, name: str, chosen: Tensor, shares: Tensor | None) -> Any:
        """The sum over samples, one added after the other; each times its share, if there are.

        Returns:
            A numpy number of the dtype.
        """
        one = self._means[name]
        values = one.mean if self._by_mean[name] else one.numerator
        if shares is not None:
            values = values * shares.to(values.dtype)
        mine = values[chosen]
        mine = mine.flip(0) if self._order == "last to first" else mine
        sums = np.add.accumulate(mine.numpy())
        return sums[-1] if len(sums) else mine.numpy().dtype.type(0)

    @staticmethod
    def scaled(total: Any, scale: float, divisor: float) -> float:
        """A total as it is recorded: with its factor, and divided, in its own dtype."""
        kind = type(total)
        return float(total * kind(scale) / kind(divisor))

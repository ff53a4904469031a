"""Strategies of packed tokens: ragged samples, empty ones, masks of any kind."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Samples of given lengths and the loss masks of their tokens."""

    lengths: list[int]
    loss_mask: list[int]

    @property
    def offsets(self) -> Tensor:
        """Where each sample begins, and the number of tokens."""
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @property
    def mask(self) -> Tensor:
        """The loss masks as a bool tensor."""
        return torch.tensor(self.loss_mask, dtype=torch.bool)

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(self.lengths)

    def tensor(self, values: list[float]) -> Tensor:
        """One float64 value a token, taken from values over and over."""
        repeats = -(-self.tokens // len(values))
        return torch.tensor((values * repeats)[: self.tokens], dtype=torch.float64)


@st.composite
def packed(draw: st.DrawFn, *, max_samples: int = 8, max_tokens: int = 40) -> Packed:
    """Draw ragged samples, now and then of one length, with masks that may be all 0 or all 1."""
    ragged = st.lists(st.integers(0, max_tokens), max_size=max_samples)
    regular = st.builds(
        lambda length, count: [length] * count,
        st.integers(0, max_tokens),
        st.integers(0, max_samples),
    )
    lengths = draw(ragged | regular)
    loss_mask: list[int] = []
    for length in lengths:
        mask = st.lists(st.integers(0, 1), min_size=length, max_size=length)
        loss_mask += draw(mask | st.just([0] * length) | st.just([1] * length))
    return Packed(lengths, loss_mask)


def float32s(low: float, high: float) -> st.SearchStrategy[float]:
    """Draw finite float32 numbers, as Python floats, of between two of them."""
    bounds = torch.tensor([low, high], dtype=torch.float32).tolist()
    return st.floats(*bounds, width=32)


def pools(values: st.SearchStrategy[float], *, size: int = 60) -> st.SearchStrategy[list[float]]:
    """Draw values to fill tokens from: few drawn numbers for many tokens."""
    return st.lists(values, min_size=1, max_size=size)

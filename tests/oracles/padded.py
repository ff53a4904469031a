"""Batches as frameworks hold them, padded to one width, and as kernels do, packed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

ROUNDOFF = 2.0**-24
# A float32 sum of these few tokens, its exponential and what is divided by it: two to the eighth.
ROUNDINGS = 256
MAX_SAMPLES, MAX_TOKENS = 6, 6
# One log-probability in twenty lies so far from the others that a log-ratio passes every clamp.
FAR, FAR_UNITS = -26.0, 65536 * 19 // 20


@dataclass(frozen=True)
class Batch:
    """Samples of ragged lengths, all tensors float32 and (S, T) unless they say otherwise."""

    lengths: Tensor  # (S,)
    mask: Tensor
    group_index: Tensor  # (S,)
    rewards: Tensor  # on the last token that counts of each sample, else its first
    greedy_rewards: Tensor  # (S,)
    components: Tensor  # (S, 2)
    token_rewards: Tensor
    values: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    weights: Tensor

    @property
    def valid(self) -> Tensor:
        """Where there is a token and not padding."""
        return torch.arange(self.mask.shape[1]) < self.lengths[:, None]

    @property
    def offsets(self) -> Tensor:
        """Where each sample begins once packed."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])

    @property
    def one_set(self) -> Tensor:
        """The set of each sample: all of them are one micro-batch."""
        return torch.zeros_like(self.lengths)

    @property
    def uid(self) -> Any:
        """The groups as verl names them."""
        return np.array([f"prompt-{group}" for group in self.group_index.tolist()], dtype=object)

    @property
    def scores(self) -> Tensor:
        """The reward of each sample."""
        return self.rewards.sum(1)

    def packed(self, padded: Tensor) -> Tensor:
        """Leave padding out."""
        return padded[self.valid]

    def spread(self, samples: Tensor) -> Tensor:
        """Give every token what its sample has."""
        return samples.repeat_interleave(self.lengths)

    @property
    def flat_mask(self) -> Tensor:
        """The mask, packed."""
        return self.packed(self.mask)


@st.composite
def batches(draw: st.DrawFn, *, groups: int = 3, all_trained: bool = False) -> Batch:
    """Draw batches with at least one token that counts, and if asked one in every sample."""
    samples = draw(st.integers(1, MAX_SAMPLES))
    lengths = draw(st.lists(st.integers(1, MAX_TOKENS), min_size=samples, max_size=samples))
    width = max(lengths) + draw(st.integers(0, 2))
    mask = torch.zeros(samples, width)
    for sample, length in enumerate(lengths):
        one = st.lists(st.booleans(), min_size=length, max_size=length)
        mask[sample, :length] = torch.tensor(draw(one | st.just([True] * length))).float()
        if (all_trained or sample == 0) and not mask[sample].any():
            mask[sample, 0] = 1.0

    def integers(kind: str, shape: tuple[int, ...]) -> Tensor:
        # One draw of bytes is many times faster than a list of numbers.
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        drawn = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), kind)
        return torch.from_numpy(drawn.astype(np.int64)).reshape(shape)

    def grid(*shape: int) -> Tensor:
        # Eighths are added in float32 without a rounding: equal rewards have a std of exactly 0.
        return ((integers("u1", shape) + 16) % 33 - 16) / 8

    def log_probs() -> Tensor:
        units = integers("u2", (samples, width))
        return torch.where(units < FAR_UNITS, -(1.0 + units) / 16384, FAR)

    rewards = torch.zeros(samples, width)
    trained = (mask * torch.arange(1, width + 1)).argmax(1)
    rewards[torch.arange(samples), trained] = grid(samples)
    valid = torch.arange(width) < torch.tensor(lengths)[:, None]
    return Batch(
        torch.tensor(lengths),
        mask,
        torch.tensor(
            draw(st.lists(st.integers(0, groups - 1), min_size=samples, max_size=samples))
        ),
        rewards,
        grid(samples),
        grid(samples, 2),
        grid(samples, width) * valid,
        grid(samples, width),
        log_probs(),
        log_probs(),
        log_probs(),
        grid(samples, width),
        (1.0 + integers("u2", (samples, width))) / 16384,
    )


def assert_rounded(found: Tensor | float, expected: Tensor | float, *, size: Any = 1.0) -> None:
    """Check that two results differ by float32 rounding only.

    Args:
        found: What the framework gives.
        expected: What the kernels give.
        size: The largest number that went into a sum; the results count as well.
    """
    one, other = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    terms = torch.cat([torch.as_tensor(size).double().flatten(), other.flatten(), torch.ones(1)])
    largest = float(terms[torch.isfinite(terms)].abs().max())
    torch.testing.assert_close(
        one, other, rtol=0.0, atol=ROUNDINGS * ROUNDOFF * largest, equal_nan=True
    )

"""Token columns moved: shifted inside each sample, or across the borders of packed samples."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.stages.cohorts.packed import Packed


def shifted(values: Tensor, offsets: Tensor, by: int) -> Tensor:
    """Token columns shifted inside each sample; the token at the border keeps its value.

    Args:
        values: (N,) float or bool.
        offsets: (S+1,) int64. Where the tokens of each sample begin.
        by: 1 puts each value one token later, -1 one earlier.

    >>> shifted(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 3, 4]), 1)
    tensor([1., 1., 2., 4.])
    """
    moved = torch.roll(values, by)
    lengths = offsets.diff()
    border = (offsets[:-1] if by > 0 else offsets[1:] - 1)[lengths > 0]
    moved[border] = values[border]
    return moved


def last_trained(packed: Packed) -> Tensor:
    """(K,) int64. The last trainable token of each sample that has one."""
    tokens = torch.where(packed.mask, torch.arange(len(packed.mask)), -1)
    owner = torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths)
    last = torch.full((len(packed.lengths),), -1).scatter_reduce(0, owner, tokens, "amax")
    return last[last >= 0]

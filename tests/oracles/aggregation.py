"""verl's ways to make one number of the losses of tokens, in kernels."""

import torch
from torch import Tensor

from tests.oracles.padded import Batch
from trajreplay.stages.kernels import sequence_mean, token_mean

MODES = (
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "token-mean",
    "token-sum",
)


def aggregate(
    tokens: Tensor,
    batch: Batch,
    mode: str,
    *,
    mask: Tensor | None = None,
    ranks: int = 1,
    global_tokens: int | None = None,
    global_samples: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Reduce packed losses as `agg_loss` does, of a rank among others if their totals are given.

    Args:
        tokens: (N,) float.
        batch: Whose tokens they are.
        mode: One of verl's.
        mask: (N,) float. What counts instead of the mask of the batch.
        ranks: How many ranks average their losses.
        global_tokens: Trained tokens of all of them.
        global_samples: Samples of all of them.
        scale: What sums of tokens are divided by in `seq-mean-token-sum-norm`, the width if None.

    Returns:
        The loss, a scalar.
    """
    counted = batch.flat_mask if mask is None else mask
    sets = (counted, batch.offsets, batch.one_set, 1)
    if mode.startswith("token"):
        total = torch.ones(1) if mode == "token-sum" else None
        if mode == "token-mean" and global_tokens is not None:
            total = torch.tensor([float(global_tokens)])
        found = token_mean(tokens, *sets, denominator=total, empty="nan").value * ranks
        return found.squeeze()
    samples = None if global_samples is None else torch.tensor([float(global_samples)])
    ones = None if mode == "seq-mean-token-mean" else torch.ones(len(batch.lengths))
    found = sequence_mean(
        tokens,
        *sets,
        token_denominator=ones,
        token_epsilon=1e-8,
        samples="trained",
        denominator=samples,
        empty="nan",
    ).value
    if mode == "seq-mean-token-sum-norm":
        found = found / (batch.mask.shape[1] if scale is None else scale)
    return (found * ranks).squeeze()

"""verl's ways to make one number of the losses of tokens, as a replay takes them."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.replayed_means import replayed_mean
from tests.oracles.padded import Batch

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
    if not bool(counted.any()) and not (mode == "token-sum" or global_samples or global_tokens):
        return torch.tensor(torch.nan)  # 0 over 0, of which a replay says that it is not finite
    norm = float(batch.mask.shape[1] if scale is None else scale)
    ways: dict[str, dict[str, Any]] = {
        "token-mean": {"denominator": global_tokens},
        "token-sum": {"denominator": 1.0},
        "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean", "count_epsilon": 1e-8},
        "seq-mean-token-sum": {"aggregation": "seq-mean-token-sum"},
        "seq-mean-token-sum-norm": {
            "aggregation": "constant-norm",
            "constant_norm": norm,
            "constant_norm_by_rows": True,
        },
    }
    way = {"denominator_rows": "with-tokens", **ways[mode]}
    if mode.startswith("seq-mean"):
        way["denominator"] = global_samples
    if mode.endswith("norm") and global_samples is not None:
        return (
            ranks
            * replayed_mean(
                tokens, counted, batch.offsets, aggregation="constant-norm", constant_norm=norm
            )
            / global_samples
        )
    return ranks * replayed_mean(tokens, counted, batch.offsets, **way)

"""Means over tokens and samples as a replay takes them."""

from typing import Any

import torch
from torch import Tensor

from trajreplay import Settings
from trajreplay.schema import Output
from trajreplay.schema.settings import LossSettings
from trajreplay.stages.compose.aggregates import Aggregates
from trajreplay.stages.kernels import segment_sum, seq_mean_token_mean

_STAGE, _TERM = "loss.policy", "pg_loss"


def replayed_mean(
    tokens: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    denominator: float | None = None,
    **changes: Any,
) -> Tensor:
    """The mean of a term over all samples.

    Args:
        tokens: (N,) The term at each token.
        mask: (N,) Not 0 where it counts.
        offsets: (S+1,) Where the tokens of each sample begin.
        denominator: What the mean is said to divide by.
        changes: Settings of the loss; a mean over tokens if they do not say.
    """
    loss = LossSettings(**{"aggregation": "token-mean", "batch_reduction": "mean", **changes})
    weights = (mask != 0).double()
    counts = segment_sum(weights, offsets)
    epsilon = loss.count_epsilon
    each = counts + epsilon if epsilon else counts.clamp(1.0)
    means = seq_mean_token_mean(tokens.double(), weights, offsets, denominator=each)
    aggregates = Aggregates(Settings(loss=loss), _STAGE, counts, counts, None, None)
    total = (means.mean if aggregates.by_mean(_TERM) else means.numerator).sum()
    output = Output(_STAGE, _TERM, scope="global", reduction="mean", denominator=denominator)
    return total / aggregates.of(_TERM).divisor(output, torch.arange(len(counts)))

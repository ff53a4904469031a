"""Tokens and samples that are left out for how far trainer and sampler disagree about them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.kl import ESTIMATORS, approx_kl
from trajreplay.stages.kernels.masked import STATISTICS, masked_sum, sample_values, spread
from trajreplay.stages.kernels.options import check_option, check_positive, check_range
from trajreplay.stages.kernels.segments import check_shapes

METRICS = ("ratio", "factor", *ESTIMATORS)


class DivergenceKeep(NamedTuple):
    """Whether each token is kept, and what it was judged by."""

    keep: Tensor
    criterion: Tensor


def divergence_keep(
    log_weights: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    metric: str = "ratio",
    statistic: str = "token",
    low: float | None = None,
    high: float | None = None,
    reverse: bool = False,
    log_ratio_clamp: tuple[float, float] | None = None,
    epsilon: float = 0.0,
) -> DivergenceKeep:
    """Keep the tokens, or the samples, whose divergence lies within bounds.

        keep = low <= c <= high      d = old - rollout, or rollout - old if reverse
        k1, k2, k3: c = statistic_t(k(d_t))      ratio: c = exp(statistic_t(d_t))
        factor: c = statistic_t(exp(|d_t|))

    Args:
        log_weights: (N,) float. `old_log_probs - rollout_log_probs`. Nat.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        metric: `ratio`, `factor`, or an estimator `k1`, `k2` or `k3` as of `approx_kl`.
        statistic: `token`, or the `sum`, `mean` or `max` over the trained tokens of a sample.
        low: Lowest value kept; None for none. Unit of the metric.
        high: Highest value kept; None for none. Unit of the metric.
        reverse: Take the rollout for the policy and the old policy for the reference.
        log_ratio_clamp: Lowest and highest d of a token. Nat.
        epsilon: What is added to the count of a mean; 0 divides by at least 1. Token.

    Returns:
        keep, (N,) bool, and criterion, (N,) in the dtype of `log_weights`; masked tokens too.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, an option has another
            value, or there is no bound or they are not in order.

    Conventions:
        verl `rollout_rs` is reverse, with d clamped to -20 and 20: `token_k1`, `seq_sum_k2`,
        `seq_max_k3` and so on. Its k1 compares -log w with the logarithms of two ratios, so that
        "0.5_5.0" keeps weights of 0.2 to 2 where IcePop keeps 0.5 to 5: give low = log 0.5 and
        high = log 5. Its k2 and k3 have an upper bound only; its means add 1e-8 to the count; of
        several options all must keep a token. AReaL is not reverse, has no clamp and 5 as upper
        bound; its sequence ratio also becomes the weight, and its action `clamp` keeps tokens but
        bounds their weights: `bound_weights` with this criterion. NeMo-RL keeps samples whose mean
        factor is at most seq_logprob_error_threshold. Both bounds are inside; NaN is
        outside. verl trains on what is kept and divides by its count, AReaL by the original one.

    Source:
        verl, `compute_rollout_rejection_mask`; AReaL, `apply_rejection_sampling`; NeMo-RL,
        `compute_and_apply_seq_logprob_error_masking`.

    >>> d = torch.tensor([3.0, 0.4, 0.25]).log()
    >>> bounds = {"low": math.log(0.5), "high": math.log(5.0)}
    >>> mask, offsets = torch.ones(3), torch.tensor([0, 3])
    >>> divergence_keep(d, mask, offsets, metric="k1", reverse=True, **bounds).keep
    tensor([False,  True,  True])
    """
    check_shapes("divergence_keep", log_weights=(log_weights, "N"), mask=(mask, "N"))
    check_option("divergence_keep", "metric", metric, METRICS)
    check_option("divergence_keep", "statistic", statistic, STATISTICS)
    check_range("divergence_keep", "the interval kept", low, high)
    d = -log_weights if reverse else log_weights
    if log_ratio_clamp is not None:
        d = d.clamp(*log_ratio_clamp)
    if metric == "factor":
        d = d.abs().exp()
    elif metric != "ratio":
        d = approx_kl(d, torch.zeros_like(d), estimator=metric)
    criterion = sample_values(d, mask, offsets, statistic=statistic, epsilon=epsilon)
    if metric == "ratio":
        criterion = criterion.exp()
    keep = ~torch.isnan(criterion)
    if low is not None:
        keep &= criterion >= low
    if high is not None:
        keep &= criterion <= high
    return DivergenceKeep(keep, criterion)


def veto(log_weights: Tensor, mask: Tensor, offsets: Tensor, *, threshold: float) -> Tensor:
    """Keep the samples in which no trained token has a weight below a threshold.

        keep_s = all_t (m_t = 0 or d_t >= log threshold)

    Args:
        log_weights: (N,) float. `old_log_probs - rollout_log_probs`, not clamped. Nat.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        threshold: Lowest weight, more than 0. Dimensionless.

    Returns:
        (N,) bool, masked tokens too.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, or the threshold is
            not positive.

    Conventions:
        slime's MIS: whatever level and mode, on raw token weights; it changes what is kept and not
        the weights. NaN is not below. A sample without trained tokens is kept.

    Source:
        slime, examples/train_infer_mismatch_helper/mis.py, `calculate_veto_mask`.

    >>> d, offsets = torch.tensor([0.0, -9.3, 0.1]), torch.tensor([0, 2, 3])
    >>> veto(d, torch.ones(3), offsets, threshold=1e-4)
    tensor([False, False,  True])
    """
    check_positive("veto", "threshold", threshold)
    catastrophic = masked_sum(log_weights < math.log(threshold), mask, offsets)
    return spread(catastrophic == 0.0, offsets)

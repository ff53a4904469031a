"""Weights that correct for where tokens were sampled: their level, their bounds, their mean."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.masked import masked_mean, sample_values
from trajreplay.stages.kernels.options import check_option, check_range
from trajreplay.stages.kernels.segments import check_shapes
from trajreplay.stages.kernels.sets import TokenSets

LEVELS = {"token": "token", "sequence": "sum", "geometric": "mean"}
ACTIONS = ("truncate", "zero")
NORMS = ("token", "sequence")

# verl, rollout_corr_helper: a mean weight of not more than this is not divided by.
SMALLEST_MEAN = 1e-8


class BoundedWeights(NamedTuple):
    """The weight of each token, and which bound it passed."""

    weight: Tensor
    below: Tensor
    above: Tensor


def importance_weights(
    log_weights: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    level: str = "token",
    clamp: tuple[float, float] | None = None,
    epsilon: float = 0.0,
    undefined: float | None = None,
) -> Tensor:
    """Weigh each token by how much likelier the trainer finds it than the sampler did.

        token: w_t = exp(d_t)      sequence: w_t = exp(sum_t m_t d_t)
        geometric: w_t = exp(sum_t m_t d_t / max(sum_t m_t, 1))

    Args:
        log_weights: (N,) float. d: `old_log_probs - rollout_log_probs`, as `log_ratio` gives it.
            Nat.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        level: `token`, `sequence` or `geometric`.
        clamp: Lowest and highest exponent, after the sum or mean; infinite for none. Nat.
        epsilon: What is added to the count of a geometric mean; 0 divides by at least 1. Token.
        undefined: What a weight that float32 does not hold becomes; None leaves it. Dimensionless.

    Returns:
        (N,) in the dtype of `log_weights`, masked tokens too. Dimensionless.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, or the level is none
            of these.

    Conventions:
        verl and slime's MIS clamp the exponent to -20 and 20; slime's TIS, TRL, NeMo-RL, OpenRLHF
        and AReaL do not. NeMo-RL makes weights that are not finite, in its float32, 0. AReaL's
        decoupled PPO puts the proximal in the place of the old policy, and has no weight at all
        without its rejection sampling. Sums run in float64. A sample without trained tokens has
        weight 1.

    Source:
        Yao et al. 2025, Your efficient RL framework secretly brings you off-policy RL training,
        fengyao.notion.site/off-policy-rl; sequences and geometric means: Liu et al. 2025, When
        speed kills stability, yingru.notion.site.

    >>> d, offsets = torch.tensor([0.5, -0.25]), torch.tensor([0, 2])
    >>> importance_weights(d, torch.ones(2), offsets, level="sequence")
    tensor([1.2840, 1.2840])
    """
    check_option("importance_weights", "level", level, tuple(LEVELS))
    exponents = sample_values(log_weights, mask, offsets, statistic=LEVELS[level], epsilon=epsilon)
    weights = (exponents if clamp is None else exponents.clamp(*clamp)).exp()
    if undefined is None:
        return weights
    return torch.where(torch.isfinite(weights.float()), weights, undefined)


def bound_weights(
    weights: Tensor,
    *,
    low: float | None = None,
    high: float | None = None,
    action: str = "truncate",
    criterion: Tensor | None = None,
) -> BoundedWeights:
    """Keep weights, or what they are judged by, within bounds.

        inside = low <= c <= high      c: the criterion, or the weight itself
        truncate: clamp(w, low, high) where not inside      zero: 0 where not inside

    Args:
        weights: (N,) float. As `importance_weights` gives them. Dimensionless.
        low: Lowest value kept; None for none. Dimensionless.
        high: Highest value kept; None for none. Dimensionless.
        action: `truncate` or `zero`.
        criterion: (N,) float. What is compared with the bounds; None for the weights.

    Returns:
        Three (N,) tensors: weight in the dtype of `weights`; below and above, bool, whose means are
        the fractions that trainers report.

    Raises:
        StageError: The inputs differ in length, the action is none of these, or there is no bound
            or they are not in order.

    Conventions:
        TIS truncates tokens to 0 and 2 (slime, Relax; NeMo-RL, OpenRLHF `tis`; verl and TRL
        `token_truncate` from above), sequence IS whole samples (verl 2, TRL `sequence_truncate`).
        IcePop zeroes tokens outside, both ends kept (NeMo-RL, slime, Relax, OpenRLHF, TRL
        `token_mask`). TRL's default `sequence_mask` zeroes samples whose summed weight is over 3.
        NeMo-RL and OpenRLHF `seq-mask-tis` zero by the geometric mean and keep the raw token
        weights: give that as the criterion. MIS in slime truncates (0 to high), truncates to both
        bounds (`clip`), or rejects, where the weights stay: that is `divergence_keep`. A criterion
        that is NaN is outside and passes neither bound.

    Source:
        As of `importance_weights`; IcePop: Ling Team 2025, ringtech.notion.site/icepop.

    >>> bound_weights(torch.tensor([0.4, 1.0, 3.0]), low=0.5, high=2.0, action="zero").weight
    tensor([0., 1., 0.])
    """
    judged = weights if criterion is None else criterion
    check_shapes("bound_weights", weights=(weights, "N"), criterion=(judged, "N"))
    check_option("bound_weights", "action", action, ACTIONS)
    check_range("bound_weights", "the interval of weights", low, high)
    below = torch.zeros_like(judged, dtype=torch.bool) if low is None else judged < low
    above = torch.zeros_like(judged, dtype=torch.bool) if high is None else judged > high
    inside = ~(below | above | torch.isnan(judged))
    outside = weights.clamp(low, high) if action == "truncate" else torch.zeros_like(weights)
    return BoundedWeights(torch.where(inside, weights, outside), below, above)


def normalised_weights(
    weights: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    level: str = "token",
    index: Tensor | None = None,
    size: int = 1,
) -> Tensor:
    """Divide weights by their mean over a batch.

        y = w / mean(w)      over trained tokens, or over samples that have some

    Args:
        weights: (N,) float, bounded. Dimensionless.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        level: `token` averages tokens, `sequence` the means of samples.
        index: (S,) int64. The batch of each sample; None if all are one.
        size: How many batches there are.

    Returns:
        (N,) in the dtype of `weights`, masked tokens too. Dimensionless.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, an index lies
            outside, or the level is neither.

    Conventions:
        verl's `rollout_is_batch_normalize`, over the whole batch; trainers that weigh inside the
        loss do it by micro-batch. A mean of at most 1e-8 is not divided by. Sums run in float64.

    Source:
        verl, `compute_rollout_correction_weights`.

    >>> normalised_weights(torch.tensor([1.0, 3.0]), torch.ones(2), torch.tensor([0, 1, 2]))
    tensor([0.5000, 1.5000])
    """
    check_shapes("normalised_weights", weights=(weights, "N"), mask=(mask, "N"))
    check_option("normalised_weights", "level", level, NORMS)
    sets = TokenSets.of("normalised_weights", mask, offsets, index, size)
    if level == "token":
        mean = sets.mean(sets.chosen(weights))
    else:
        samples = masked_mean(weights, mask, offsets)
        trained = masked_mean(torch.ones_like(weights), mask, offsets)
        total = torch.zeros_like(sets.count).index_add_(0, sets.samples, samples)
        count = torch.zeros_like(sets.count).index_add_(0, sets.samples, trained)
        mean = total / count.clamp(min=1.0)
    divisor = torch.where(mean > SMALLEST_MEAN, mean, 1.0)
    return (weights / sets.everywhere(divisor, offsets)).to(weights.dtype)

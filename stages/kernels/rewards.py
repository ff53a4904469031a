"""Rewards scored within their group, and what float32 may change of it."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.groups import Groups, groups_of
from trajreplay.stages.kernels.precision import (
    FLOAT32_ROUNDOFF,
    FLOAT32_TINY,
    accumulation_factor,
    finite_or_nan,
)
from trajreplay.stages.kernels.segments import check_shapes

BASELINES = ("mean", "none")

# Rewards on this grid, with absolute values that sum to less than 2^24 steps of it, are added
# without a rounding in any order: 0 and 1, halves, tenths of 2, but not 0.1.
EXACT_STEP = 2.0**-12


def group_rewards(
    raw_rewards: Tensor,
    group_index: Tensor,
    *,
    baseline: str = "mean",
    divide_by_std: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Tensor:
    """Score each sample against the other samples of its group.

        c_i = r_i - mean_g(r)      b_i = c_i, or r_i without baseline
        A_i = b_i / (std_g(c) + epsilon)      with g the group of i

    Args:
        raw_rewards: (S,) float. One reward per sample.
        group_index: (S,) int64. The group of each sample, any numbers in any order.
        baseline: `mean` or `none`.
        divide_by_std: Whether to divide; Dr. GRPO does not.
        ddof: The variance divides by n - ddof.
        epsilon: Keeps a group of equal rewards finite. Unit of `raw_rewards`.

    Returns:
        (S,) in the dtype of `raw_rewards`. Dimensionless, or in its unit without division.

    Raises:
        StageError: The inputs differ in length, or there is no such baseline.

    Conventions:
        Sums run in float64, on rewards less the smallest of the group: a group of equal rewards
        gets exactly 0, where float32 trainers get a rounding error over epsilon (0.03 for eight
        of 0.3). A group of ddof samples or fewer is not divided, so that a group of one gets 0.
        NaN or an infinity makes its group NaN, without division at least itself. Epsilon is
        1e-6 in slime, Relax, verl and NeMo-RL, 1e-4 in TRL, 1e-5 in AReaL, 1e-9 in OpenRLHF.

    Source:
        Shao et al. 2024, DeepSeekMath, section 4.1.2, arXiv:2402.03300; without division: Liu et
        al. 2025, Dr. GRPO, arXiv:2503.20783.

    >>> group_rewards(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, 9]))
    tensor([ 0.7071, -0.7071,  0.0000])
    """
    _check("group_rewards", raw_rewards, group_index, baseline)
    raw = raw_rewards.double()
    groups = groups_of(group_index)
    scored = centred = _centred(raw, groups)
    if baseline == "none":
        scored = raw.clone()
    if divide_by_std:
        spread = _spread(centred, groups, ddof)[groups.member]
        divided = groups.size[groups.member] > ddof
        scored = torch.where(divided, scored / (spread + epsilon), scored)
    return scored.to(raw_rewards.dtype)


def group_rewards_error(
    raw_rewards: Tensor,
    group_index: Tensor,
    *,
    baseline: str = "mean",
    divide_by_std: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Tensor:
    """Bound how far a float32 evaluation of `group_rewards` may lie from the exact value.

        e(mean) = f(n + 1) mean_g(|r|)      e(c) = e(mean) + u (|c| + e(mean))
        w = sqrt(s^2 + n / (n - ddof) e(mean)^2)      e(s) = 3 f(n + 4) w
        e(A) = e(b) / D- + |b| max(D+ - D, D - D-) / (D D-) + u |A|
        with D = s + epsilon, D+ = w + e(s) + epsilon, D- = max(s - e(s), 0) + epsilon

    Args:
        raw_rewards: (S,) float. As given to the trainer.
        group_index: (S,) int64. The group of each sample, any numbers in any order.
        baseline: As in `group_rewards`.
        divide_by_std: As in `group_rewards`.
        ddof: As in `group_rewards`.
        epsilon: As in `group_rewards`.

    Returns:
        (S,) float64. Unit of `group_rewards`.

    Raises:
        StageError: As in `group_rewards`.

    Conventions:
        The trainer is taken to round the rewards to float32, whose effect is computed and added,
        or to keep float64. Any order of the sums; the std of the rewards or of the centred ones by
        two passes, where a wrong mean can only add to it, or of the centred ones by Welford. Where
        the rewards of a group are multiples of `EXACT_STEP` their sum has no error, and neither
        has their mean if n is a power of two, so that a full group of equal whole rewards has
        bound 0. Overflow is outside the bound. Rewards that are not finite, and a std that may be
        0 with an epsilon of 0, give NaN: agreement is `difference <= bound`, never
        `not difference > bound`.

    Source:
        Higham 2002, Accuracy and stability of numerical algorithms, sections 1.9 and 4.2; the
        mean's second-order effect on the variance: Chan, Golub & LeVeque 1983, The American
        Statistician 37(3); f: `accumulation_factor`.

    >>> rewards, group_index = torch.tensor([0.3, 0.3, 0.3, 1.0]), torch.tensor([0, 0, 0, 1])
    >>> group_rewards_error(rewards, group_index)
    tensor([0.0715, 0.0715, 0.0715, 0.0000], dtype=torch.float64)
    """
    _check("group_rewards_error", raw_rewards, group_index, baseline)
    u = FLOAT32_ROUNDOFF

    def exact(rewards: Tensor) -> Tensor:
        return group_rewards(
            rewards,
            group_index,
            baseline=baseline,
            divide_by_std=divide_by_std,
            ddof=ddof,
            epsilon=epsilon,
        )

    raw = raw_rewards.double()
    rounded = raw.float().double()
    value = exact(rounded)
    entry_error = (value - exact(raw)).abs()

    groups = groups_of(group_index)
    mean_error = _mean_error(rounded, groups)
    mean_error_of = mean_error[groups.member]
    centred = _centred(rounded, groups)
    if baseline == "mean":
        scored = centred
        error = mean_error_of + u * (centred.abs() + mean_error_of)
    else:
        scored, error = rounded, torch.zeros_like(rounded)
    if divide_by_std:
        lower, spread, upper = (
            one[groups.member] for one in _spread_bounds(centred, mean_error, groups, ddof)
        )
        divisor = spread + epsilon
        least = (lower + (1.0 - u) * epsilon) * (1.0 - u)
        most = (upper + (1.0 + u) * epsilon) * (1.0 + u)
        slack = torch.maximum(most - divisor, divisor - least) / (divisor * least)
        quotient_error = error / least + scored.abs() * slack
        quotient_error += u * (value.abs() + quotient_error) + FLOAT32_TINY
        still = (scored == 0.0) & (error == 0.0) & (least > 0.0)
        quotient_error = torch.where(still, 0.0, quotient_error)
        error = torch.where(groups.size[groups.member] > ddof, quotient_error, error)
    return finite_or_nan(entry_error + error)


def _check(kernel: str, raw_rewards: Tensor, group_index: Tensor, baseline: str) -> None:
    check_shapes(kernel, raw_rewards=(raw_rewards, "S"), group_index=(group_index, "S"))
    if baseline not in BASELINES:
        raise StageError(
            f"{kernel}: no baseline {baseline!r}, expected one of {', '.join(BASELINES)}",
            hint="Leave-one-out baselines are another kernel.",
        )


def _centred(raw: Tensor, groups: Groups) -> Tensor:
    # Any finite shift is right; the smallest reward makes equal ones exactly 0 in any order.
    shift = groups.least(raw)
    shifted = raw - torch.where(torch.isfinite(shift), shift, 0.0)[groups.member]
    return shifted - groups.mean(shifted)[groups.member]


def _spread(centred: Tensor, groups: Groups, ddof: int) -> Tensor:
    return (groups.sum(centred**2) / (groups.size - ddof).clamp(min=1.0)).sqrt()


def _mean_error(rounded: Tensor, groups: Groups) -> Tensor:
    """Bound the float32 mean of each group, tighter where its sum or all of it is exact."""
    size = groups.sum(rounded.abs())
    on_grid = (rounded / EXACT_STEP).frac() == 0.0
    exact_sum = (groups.least(on_grid.double()) == 1.0) & (size < EXACT_STEP * 2.0**24)
    exact_sum |= groups.size == 1.0
    power_of_two = torch.frexp(groups.size).mantissa == 0.5
    division = torch.where(power_of_two, 0.0, 2.0 * FLOAT32_ROUNDOFF)
    factor = torch.where(exact_sum, division, accumulation_factor(groups.size + 1.0))
    return factor * size / groups.size


def _spread_bounds(
    centred: Tensor, mean_error: Tensor, groups: Groups, ddof: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Bound the float32 std of each group from below and above, with the exact one between."""
    spread = _spread(centred, groups, ddof)
    inflation = groups.size / (groups.size - ddof).clamp(min=1.0)
    # Squares below the smallest normal number may vanish or appear.
    lost = torch.where(spread + mean_error > 0.0, FLOAT32_TINY, 0.0)
    widest = (spread**2 + inflation * mean_error**2).sqrt()
    error = 3.0 * accumulation_factor(groups.size + 4.0) * widest + (inflation * lost).sqrt()
    return (spread - error).clamp(min=0.0), spread, widest + error

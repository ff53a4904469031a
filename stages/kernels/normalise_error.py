"""What float32 may change of rewards that are normalised within their group."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.stages.kernels.groups import Groups, groups_of
from trajreplay.stages.kernels.normalise import (
    OF_THE_GROUP,
    divisor_of,
    normalise_rewards,
    others_equal,
    variance_of,
)
from trajreplay.stages.kernels.precision import (
    FLOAT32_ROUNDOFF,
    FLOAT32_TINY,
    accumulation_factor,
)
from trajreplay.stages.kernels.rounded import (
    Rounded,
    exact_sums,
    in_float32,
    mean_error,
    quotient,
    sum_error,
)

U = FLOAT32_ROUNDOFF


def normalised(
    rewards: Rounded,
    group_index: Tensor,
    *,
    baseline: str = "mean",
    divisor: str = "none",
    divisor_index: Tensor | None = None,
    ddof: int = 1,
    epsilon: float = 1e-6,
    epsilon_place: str = "added",
    lone: str = "zero",
    missing: str = "keep",
    lengths: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
) -> Rounded:
    """Normalise rewards, and bound how far a float32 evaluation may lie from the exact value.

        e(mean) = mean_g(e) + f(n + 1) mean_g(|r| + e)      e(c) = e(r) + e(b) + u (|c| + ...)
        s +- e(s): the deviations that the rounded rewards, a rounded mean and a sum of n squares
            may have, in one pass over the others for leave-one-out-std
        e(A) = max |A - (c +- e(c)) / d(s +- e(s))| + u |A|

    Args:
        rewards: (S,), and what they may be off by.
        group_index: (S,) int64. As in `normalise_rewards`, and so are the others.
        baseline: As there.
        divisor: As there.
        divisor_index: As there.
        ddof: As there.
        epsilon: As there.
        epsilon_place: As there.
        lone: As there.
        missing: As there.
        lengths: As there.
        greedy_rewards: As there.

    Returns:
        (S,), exact values and bounds. Where a divisor may be 0 the bound is not finite.

    Raises:
        StageError: As `normalise_rewards`.

    Conventions:
        Any order of the sums, a leave-one-out mean from the sum or from the mean. Rewards that are
        multiples of `EXACT_STEP` add up exactly, so that a constant group of a power of two of
        them has bound 0. A leave-one-out deviation is one of a mean square less a squared mean, as
        in NeMo-RL, which also divides by none that is 0. A baseline as divisor that may be 0 has
        no bound, and neither has a deviation that may be 0 without an epsilon, unless what is
        normalised is itself a rounded score (GDPO): n of them score less than the root of n.

    Source:
        Higham 2002, Accuracy and stability of numerical algorithms, sections 1.9 and 4.2; the
        mean's second-order effect on the variance: Chan, Golub & LeVeque 1983, The American
        Statistician 37(3); f: `accumulation_factor`.

    >>> rewards = in_float32(torch.tensor([0.3, 0.3, 0.3, 1.0]))
    >>> normalised(rewards, torch.tensor([0, 0, 0, 1]), divisor="std").error
    tensor([0.0715, 0.0715, 0.0715, 0.0000], dtype=torch.float64)
    """
    value = normalise_rewards(
        rewards.value,
        group_index,
        baseline=baseline,
        divisor=divisor,
        divisor_index=divisor_index,
        ddof=ddof,
        epsilon=epsilon,
        epsilon_place=epsilon_place,
        lone=lone,
        missing=missing,
        lengths=lengths,
        greedy_rewards=greedy_rewards,
    )
    known = ~rewards.value.isnan() | (missing == "keep")
    raw, shared = rewards[known], group_index if divisor_index is None else divisor_index
    groups, spread_groups = groups_of(group_index[known]), groups_of(shared[known])
    extra = {"length-weighted": lengths, "greedy": greedy_rewards}.get(baseline)
    extra = raw.value if extra is None else extra.double()[known]
    # What is centred, before anything is divided; a group of one has no baseline of itself.
    before = normalise_rewards(
        rewards.value,
        group_index,
        baseline=baseline,
        lone=lone,
        missing=missing,
        lengths=lengths,
        greedy_rewards=greedy_rewards,
    )[known]
    centred = Rounded(before, _centred_error(raw, before, groups, baseline, extra))
    if baseline in OF_THE_GROUP:
        alone = groups.size[groups.member] == 1.0
        own = raw.error if lone == "keep" else torch.zeros_like(raw.error)
        centred = Rounded(before, torch.where(alone, own, centred.error))
    error, own_value = centred.error, value[known]
    if divisor == "baseline":
        error = _over_baseline(raw, centred, own_value)
    elif divisor != "none":
        low, high = _variances(raw, centred, spread_groups, divisor, ddof)
        least, most = _divisors(low, high, epsilon, epsilon_place)
        error = quotient(centred, least, most, own_value)
        undivided = (own_value - centred.value).abs() + centred.error
        if divisor == "leave-one-out-std":
            error = torch.where(low == 0.0, torch.maximum(error, undivided), error)
        if divisor == "leave-one-out-std" or epsilon == 0.0:
            error = torch.where(high == 0.0, undivided, error)
        if divisor == "std" and baseline == "mean" and divisor_index is None and epsilon == 0.0:
            # Whatever they are, n numbers are normalised to less than the root of n.
            size = spread_groups.size[spread_groups.member]
            open_ended = (low == 0.0) & (high > 0.0) & (raw.error > 0.0)
            error = torch.where(open_ended, own_value.abs() + size.sqrt(), error)
        fewest = 1 if divisor == "leave-one-out-std" else ddof
        alone = spread_groups.size[spread_groups.member] <= fewest
        kept = centred.error + 2.0 * U * own_value.abs()
        error = torch.where(alone, kept if lone == "keep" else torch.zeros_like(kept), error)
    errors = torch.zeros_like(rewards.error)
    errors[known] = error
    return Rounded(value, errors)


def deviations(
    rewards: Rounded, group_index: Tensor, *, ddof: int, epsilon: float
) -> tuple[Tensor, Tensor]:
    """(S,) twice. The least and the most that deviation and epsilon of a group may be."""
    low, high = _variances(rewards, rewards, groups_of(group_index), "std", ddof)
    return _divisors(low, high, epsilon, "added")


def _divisors(low: Tensor, high: Tensor, epsilon: float, place: str) -> tuple[Tensor, Tensor]:
    least = divisor_of(low, epsilon * (1.0 - U), place) * (1.0 - 3.0 * U)
    return least, divisor_of(high, epsilon * (1.0 + U), place) * (1.0 + 3.0 * U)


def _centred_error(
    raw: Rounded, centred: Tensor, groups: Groups, baseline: str, extra: Tensor
) -> Tensor:
    if baseline == "none":
        return raw.error
    if baseline == "greedy":
        return (raw - in_float32(extra)).error
    size = groups.size[groups.member]
    level = (raw.value - centred).abs()
    mean = mean_error(raw, groups)[groups.member]
    if baseline == "length-weighted":
        weight = groups.sum(extra)
        rounding = accumulation_factor(2.0 * groups.size + 3.0)
        absolute = groups.sum(extra * (raw.value.abs() + raw.error))
        inherited = groups.sum(extra * raw.error)
        mean = ((inherited + rounding * absolute) / weight)[groups.member]
    elif baseline == "leave-one-out":
        # Either the others' sum over n - 1, or n / (n - 1) times the distance from the mean.
        others = sum_error(raw, groups)[groups.member] + raw.error
        exact = (others == 0.0) & (level.float().double() == level)
        others = others / (size - 1.0) + torch.where(exact, 0.0, 3.0 * U * level)
        factor = size / (size - 1.0)
        scaled = (
            factor * (raw.error + mean) + torch.where(mean == 0.0, 2.0, 4.0) * U * centred.abs()
        )
        mean = torch.maximum(others, scaled)
    return raw.error + mean + U * (centred.abs() + raw.error + mean)


def _over_baseline(raw: Rounded, centred: Rounded, value: Tensor) -> Tensor:
    level, error = raw.value - centred.value, raw.error + centred.error
    divided = quotient(centred, level - error, level + error, value)
    divided = torch.where(level - error > 0.0, divided, torch.nan)
    return torch.where(level + error <= 0.0, 0.0, divided)


def _variances(
    raw: Rounded, centred: Rounded, groups: Groups, divisor: str, ddof: int
) -> tuple[Tensor, Tensor]:
    """(S,) twice. The least and the most that a float32 variance may be."""
    if divisor == "leave-one-out-std":
        return _variances_of_others(raw, groups, ddof)
    own = centred if divisor == "std-around-baseline" else raw
    exact = variance_of(raw.value, centred.value, groups, divisor, ddof)
    spread = exact.clamp(min=0.0).sqrt()
    free = (groups.size - ddof).clamp(min=1.0)
    inherited = (groups.sum(own.error**2) / free).sqrt()[groups.member]
    mean = torch.zeros_like(spread)
    if divisor == "std":
        mean = mean_error(raw, groups)[groups.member]
    inflation = (groups.size / free)[groups.member]
    # Squares below the smallest normal number may vanish or appear.
    lost = torch.where(spread + mean + inherited > 0.0, FLOAT32_TINY, 0.0)
    widest = ((spread + inherited) ** 2 + inflation * mean**2).sqrt()
    rounding = 3.0 * accumulation_factor(groups.size + 4.0)[groups.member]
    error = inherited + rounding * widest + (inflation * lost).sqrt()
    return (spread - error).clamp(min=0.0) ** 2, (widest + error) ** 2


def _variances_of_others(raw: Rounded, groups: Groups, ddof: int) -> tuple[Tensor, Tensor]:
    """The same of the other members, mean square less squared mean."""
    exact = variance_of(raw.value, raw.value, groups, "leave-one-out-std", ddof)
    count = groups.size[groups.member] - 1.0

    def mean_of_others(values: Tensor) -> Tensor:
        return (groups.sum(values)[groups.member] - values).clamp(min=0.0) / count

    square = mean_of_others((raw.value.abs() + raw.error) ** 2)
    inherited = 2.0 * mean_of_others((raw.value.abs() + raw.error) * raw.error)
    # A square, both sums, both divisions, the squared mean and the difference.
    rounding = accumulation_factor(3.0 * count + 4.0) * square
    error = 2.0 * inherited + rounding
    whole = exact_sums(Rounded(raw.value**2, raw.error), groups)[groups.member]
    still = others_equal(raw.value, groups) & (whole | (count == 1.0))
    free = (count - ddof).clamp(min=1.0)
    error = torch.where(still, 0.0, error * count / free)
    return (exact - error).clamp(min=0.0), exact + error

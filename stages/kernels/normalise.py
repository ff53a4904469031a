"""Rewards normalised within their group: every baseline and every divisor of the trainers."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.groups import Groups, groups_of
from trajreplay.stages.kernels.options import check_ddof, check_option, in_dtype_of
from trajreplay.stages.kernels.segments import check_shapes

OF_THE_GROUP = ("mean", "leave-one-out", "length-weighted")
GROUP_BASELINES = ("none", *OF_THE_GROUP, "greedy")
DIVISORS = ("none", "std", "std-around-baseline", "leave-one-out-std", "baseline")
EPSILON_PLACES = ("added", "floored", "inside")
LONE_RULES = ("zero", "keep", "nan")
MISSING_RULES = ("keep", "exclude")


def normalise_rewards(
    rewards: Tensor,
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
) -> Tensor:
    """Score each sample against the other samples of its group.

        A_i = (r_i - b_i) / d_i

        b = 0 (none), mean_g(r) (mean), (sum_g(r) - r_i) / (n - 1) (leave-one-out),
            sum_g(l r) / sum_g(l) (length-weighted), the greedy reward of i (greedy)
        d = 1 (none), b (baseline), or sqrt(v) + epsilon with v over the divisor group:
            sum (r - mean(r))^2 / (n - ddof) (std), sum (r - b)^2 / (n - ddof)
            (std-around-baseline), or as std without sample i (leave-one-out-std)

    Args:
        rewards: (S,) float. One reward per sample; NaN where it is missing.
        group_index: (S,) int64. The group of each sample, any numbers in any order.
        baseline: As above.
        divisor: As above.
        divisor_index: (S,) int64. Which samples share a divisor, if not the group; the batch, say.
        ddof: 0 or 1.
        epsilon: Keeps a division by a std finite. Unit of `rewards`.
        epsilon_place: `added` as above, `floored` (sqrt(max(v, epsilon)) + epsilon) or `inside`
            (sqrt(v + epsilon)).
        lone: What a sample alone in its group, or in one too small for its divisor, scores:
            `zero`, `keep` (b is 0 there, d is 1 + epsilon) or `nan` (0 / 0).
        missing: `keep` (NaN reaches its group) or `exclude` (from every statistic; scores 0).
        lengths: (S,) integer or float, l. For the length-weighted baseline. Token.
        greedy_rewards: (S,) float. For the greedy baseline. Unit of `rewards`.

    Returns:
        (S,) in the dtype of `rewards` if that is floating, else float64. Dimensionless, or in
        their unit without divisor.

    Raises:
        StageError: The inputs differ in length, an option has no such value, or what a
            baseline needs is not given.

    Conventions:
        Sums run in float64 on rewards less the smallest of the group, so that equal rewards score
        exactly 0; float32 trainers get a rounding error over epsilon. Where nothing varies a std
        of 0 with an epsilon of 0 divides nothing, and neither does a leave-one-out std of 0
        whatever the epsilon, as in NeMo-RL: two samples score plus and minus their difference. A
        baseline of 0 or less as divisor scores 0. NaN and infinity reach their group only. The
        leave-one-out variance is a difference: it loses digits where one reward lies 1e5 times as
        far out as the others.

        slime and Relax: mean, std, 1e-6. verl: the same with lone `keep`; vectorized `floored`
        (`added` in 0.9). TRL: 1e-4, missing `exclude`, the batch as divisor group or no divisor.
        OpenRLHF: 1e-9, lone `nan`. AReaL: std-around-baseline, 1e-5, lone `keep`, groups and batch
        in any combination. NeMo-RL: leave-one-out twice, 1e-6. prime-rl and Dr. GRPO: no divisor;
        max_rl divides by the mean. RLOO is leave-one-out without divisor, the same number as
        n / (n - 1) (r - mean); alone it keeps r in verl, is NaN in OpenRLHF, refused by Relax. OPO
        weights by length, lone `keep`. ReMax is greedy.

    Source:
        Shao et al. 2024, DeepSeekMath, section 4.1.2, arXiv:2402.03300; leave-one-out: Ahmadian et
        al. 2024, arXiv:2402.14740; length-weighted: Hao et al. 2025, arXiv:2505.23585; greedy: Li
        et al. 2023, arXiv:2310.10505; the rest as the trainers named do.

    >>> rewards, group_index = torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.tensor([3, 3, 3, 3])
    >>> normalise_rewards(rewards, group_index, divisor="std")
    tensor([ 1.3056, -0.7833, -0.7833,  0.2611])
    >>> normalise_rewards(
    ...     rewards, group_index, baseline="leave-one-out", divisor="leave-one-out-std"
    ... )
    tensor([ 2.8867, -1.0000, -1.0000,  0.2887])
    """
    kernel = "normalise_rewards"
    check_option(kernel, "baseline", baseline, GROUP_BASELINES)
    check_option(kernel, "divisor", divisor, DIVISORS)
    check_option(kernel, "epsilon_place", epsilon_place, EPSILON_PLACES)
    check_option(kernel, "lone rule", lone, LONE_RULES)
    check_option(kernel, "missing rule", missing, MISSING_RULES)
    check_ddof(kernel, ddof)
    weights = _weights(kernel, rewards, baseline, lengths, greedy_rewards)
    shared = group_index if divisor_index is None else divisor_index
    check_shapes(
        kernel,
        rewards=(rewards, "S"),
        group_index=(group_index, "S"),
        divisor_index=(shared, "S"),
        weights=(weights, "S"),
    )
    known = ~rewards.isnan() if missing == "exclude" else torch.ones_like(rewards, dtype=torch.bool)
    raw, extra = rewards.double()[known], weights.double()[known]
    groups, spread_groups = groups_of(group_index[known]), groups_of(shared[known])

    scored = _less_baseline(raw, groups, baseline, extra)
    if baseline in OF_THE_GROUP:
        own = raw if lone == "keep" else scored
        scored = _with_lone(scored, own, groups.size[groups.member] == 1.0, lone)
    if divisor == "baseline":
        level = raw - scored
        scored = torch.where(level <= 0.0, 0.0, scored / level)
    elif divisor != "none":
        variance = variance_of(raw, scored, spread_groups, divisor, ddof)
        if divisor == "leave-one-out-std" or epsilon == 0.0:
            divided = torch.where(
                variance == 0.0, scored, scored / divisor_of(variance, epsilon, epsilon_place)
            )
        else:
            divided = scored / divisor_of(variance, epsilon, epsilon_place)
        fewest = 1 if divisor == "leave-one-out-std" else ddof
        alone = spread_groups.size[spread_groups.member] <= fewest
        own = scored / (1.0 + epsilon) if lone == "keep" else torch.full_like(scored, torch.nan)
        scored = _with_lone(divided, own, alone, lone)
    result = torch.zeros(rewards.shape, dtype=torch.float64, device=rewards.device)
    result[known] = scored
    return in_dtype_of(rewards, result)


def _weights(
    kernel: str, rewards: Tensor, baseline: str, lengths: Tensor | None, greedy: Tensor | None
) -> Tensor:
    """Choose what the baseline needs of each sample besides its reward."""
    needed = {"length-weighted": ("lengths", lengths), "greedy": ("greedy_rewards", greedy)}
    name, weights = needed.get(baseline, ("rewards", rewards))
    if weights is None:
        raise StageError(
            f"{kernel}: baseline {baseline!r} without {name}, expected one a sample",
            hint=f"Pass {name} or choose another baseline.",
        )
    return weights


def _shifted(raw: Tensor, groups: Groups) -> Tensor:
    # Any finite shift is right; the smallest reward makes equal ones exactly 0 in any order.
    least = groups.least(raw)
    return raw - torch.where(torch.isfinite(least), least, 0.0)[groups.member]


def _less_baseline(raw: Tensor, groups: Groups, baseline: str, extra: Tensor) -> Tensor:
    if baseline == "none":
        return raw
    if baseline == "greedy":
        return raw - extra
    shifted = _shifted(raw, groups)
    if baseline == "length-weighted":
        return shifted - (groups.sum(extra * shifted) / groups.sum(extra))[groups.member]
    centred = shifted - groups.mean(shifted)[groups.member]
    if baseline == "mean":
        return centred
    size = groups.size[groups.member]
    return centred * size / (size - 1.0)


def variance_of(raw: Tensor, scored: Tensor, groups: Groups, divisor: str, ddof: int) -> Tensor:
    """(S,) The variance that a divisor is the root of; arguments as of `normalise_rewards`."""
    size = groups.size[groups.member]
    if divisor == "std-around-baseline":
        return groups.sum(scored**2)[groups.member] / (size - ddof)
    shifted = _shifted(raw, groups)
    centred = shifted - groups.mean(shifted)[groups.member]
    squares = groups.sum(centred**2)[groups.member]
    if divisor == "std":
        return squares / (size - ddof)
    others = (squares - centred**2 * size / (size - 1.0)).clamp(min=0.0)
    return torch.where(others_equal(raw, groups), 0.0, others / (size - 1.0 - ddof))


def divisor_of(variance: Tensor, epsilon: float, place: str) -> Tensor:
    """What is divided by where the variance is this; arguments as of `normalise_rewards`."""
    if place == "inside":
        return (variance + epsilon).sqrt()
    if place == "floored":
        variance = variance.clamp(min=epsilon)
    return variance.sqrt() + epsilon


def others_equal(raw: Tensor, groups: Groups) -> Tensor:
    """Mark the samples without which their group is constant: differences would leave a rest."""
    lowest = raw == groups.least(raw)[groups.member]
    highest = raw == -groups.least(-raw)[groups.member]
    lowest_count, highest_count = (
        groups.sum(one.double())[groups.member] for one in (lowest, highest)
    )
    all_but_one = groups.size[groups.member] - 1.0
    odd_low = lowest & (lowest_count == 1.0) & (highest_count == all_but_one)
    odd_high = highest & (highest_count == 1.0) & (lowest_count == all_but_one)
    return odd_low | odd_high | (lowest & highest)


def _with_lone(scored: Tensor, own: Tensor, alone: Tensor, lone: str) -> Tensor:
    """Score the samples that are alone by the rule for them."""
    return torch.where(alone, 0.0 if lone == "zero" else own, scored)

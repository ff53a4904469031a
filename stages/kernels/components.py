"""Rewards of several components: added up and normalised, or the other way round."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.normalise import MISSING_RULES, normalise_rewards
from trajreplay.stages.kernels.options import check_option, in_dtype_of
from trajreplay.stages.kernels.segments import check_shapes


def summed_rewards(components: Tensor, weights: Tensor, *, missing: str = "keep") -> Tensor:
    """Add up the components of each reward.

        r_i = sum_k w_k r_ik

    Args:
        components: (S, K) float. NaN where a component is missing.
        weights: (K,) float, w. Dimensionless.
        missing: `keep` (one NaN makes the sum NaN) or `exclude` (it counts as 0; a sample with no
            component at all stays NaN).

    Returns:
        (S,) in the dtype of `components` if that is floating, else float64. Unit of `components`.

    Raises:
        StageError: There is not one weight a component, or no such rule.

    Conventions:
        Sums run in float64. The first half of TRL's sum_then_normalize, which excludes; the second
        is `normalise_rewards` with missing rewards excluded. Without components the sum is 0.

    Source:
        TRL, GRPOTrainer, reward_weights.

    >>> components = torch.tensor([[1.0, 0.0], [torch.nan, 2.0], [torch.nan, torch.nan]])
    >>> summed_rewards(components, torch.tensor([1.0, 0.5]), missing="exclude")
    tensor([1., 1., nan])
    """
    kernel = "summed_rewards"
    check_shapes(kernel, components=(components, "SK"), weights=(weights, "K"))
    check_option(kernel, "missing rule", missing, MISSING_RULES)
    weighted = components.double() * weights.double()
    if missing == "keep":
        return in_dtype_of(components, weighted.sum(1))
    return in_dtype_of(components, _sum_of_known(weighted, components))


def decoupled_rewards(
    components: Tensor,
    weights: Tensor,
    group_index: Tensor,
    *,
    batch_index: Tensor | None = None,
    batch_epsilon: float | None = 1e-4,
    missing: str = "keep",
    baseline: str = "mean",
    divisor: str = "std",
    ddof: int = 1,
    epsilon: float = 1e-4,
    lone: str = "zero",
) -> Tensor:
    """Normalise each component within its group, add up, and normalise over the batch.

        A_ik = normalise_rewards(r_k)_i      x_i = sum_k w_k A_ik
        A_i = (x_i - mean(x)) / (std(x) + batch_epsilon)      over the batch of i

    Args:
        components: (S, K) float. NaN where a component is missing.
        weights: (K,) float, w. Dimensionless.
        group_index: (S,) int64. The group of each sample, any numbers in any order.
        batch_index: (S,) int64. The batch of each sample; one batch if not given.
        batch_epsilon: Added to the std of the batch; None leaves the last step out. Dimensionless.
        missing: `keep` or `exclude`, as in `summed_rewards` and `normalise_rewards`.
        baseline: As in `normalise_rewards`: `none`, `mean` or `leave-one-out`.
        divisor: As in `normalise_rewards`.
        ddof: As in `normalise_rewards`, of the group and of the batch.
        epsilon: As in `normalise_rewards`. Unit of `components`.
        lone: As in `normalise_rewards`.

    Returns:
        (S,) in the dtype of `components` if that is floating, else float64. Dimensionless.

    Raises:
        StageError: The inputs differ in length, there are fewer than two components or not one
            weight each, or an option has no such value.

    Conventions:
        Sums run in float64. TRL's normalize_then_sum has 1e-4 twice and excludes. NeMo-RL's GDPO is
        leave-one-out twice with 1e-6, and a batch epsilon of 0, where a std of 0 divides nothing.
        verl whitens the sum over tokens: no batch epsilon here, and `whiten` after it. A sample
        with no component scores 0 where missing ones are excluded. There a component that scores
        NaN, since it is alone in its group, adds nothing to the sum, as in TRL.

    Source:
        Liu et al. 2026, GDPO, arXiv:2601.05242.

    >>> components = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 9.0], [0.0, 0.0]])
    >>> decoupled_rewards(components, torch.ones(2), torch.tensor([0, 0, 1, 1]))
    tensor([ 0.5477, -0.5477,  1.0954, -1.0954])
    """
    kernel = "decoupled_rewards"
    check_shapes(
        kernel,
        components=(components, "SK"),
        weights=(weights, "K"),
        group_index=(group_index, "S"),
    )
    samples, count = components.shape
    if count < 2:
        raise StageError(
            f"{kernel}: {count} components, expected two or more",
            hint="Normalise a single reward with normalise_rewards.",
        )
    # One group for each component of each group: one call normalises them all.
    member = torch.unique(group_index, return_inverse=True)[1]
    parts = member[:, None] * count + torch.arange(count, device=member.device)
    scored = normalise_rewards(
        components.double().flatten(),
        parts.flatten(),
        baseline=baseline,
        divisor=divisor,
        ddof=ddof,
        epsilon=epsilon,
        lone=lone,
        missing=missing,
    )
    weighted = scored.reshape(samples, count) * weights.double()
    total = weighted.sum(1)
    if missing == "exclude":
        total = _sum_of_known(weighted, components)
    if batch_epsilon is None:
        return in_dtype_of(components, total.nan_to_num(0.0) if missing == "exclude" else total)
    batches = torch.zeros_like(member) if batch_index is None else batch_index
    whole = normalise_rewards(
        total, batches, divisor="std", ddof=ddof, epsilon=batch_epsilon, missing=missing
    )
    return in_dtype_of(components, whole)


def _sum_of_known(weighted: Tensor, components: Tensor) -> Tensor:
    """Sum what is a number of each sample; NaN where a sample has no component."""
    total = weighted.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).sum(1)
    unknown = components.isnan().all(1) & (components.shape[1] > 0)
    return total.masked_fill(unknown, torch.nan)

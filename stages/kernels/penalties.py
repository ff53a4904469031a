"""What a sample pays of its reward before it is scored: for what it cost, or for its KL."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.groups import groups_of
from trajreplay.stages.kernels.masked import masked_sum
from trajreplay.stages.kernels.options import in_dtype_of
from trajreplay.stages.kernels.segments import check_shapes


def cost_penalised_rewards(
    rewards: Tensor, costs: Tensor, group_index: Tensor, *, weights: tuple[float, ...]
) -> Tensor:
    """Take off each reward a share of its group's mean, the larger the more the sample cost.

        y_i = r_i - mean_g(r) sum_k w_k c_ik / max_g(c_k)      with g the group of i

    Args:
        rewards: (S,) float. One reward per sample.
        costs: (S, K) integer or float, 0 or more. Output tokens, input tokens and turns, say.
        group_index: (S,) int64. The group of each sample, any numbers in any order.
        weights: w, one a cost. Dimensionless.

    Returns:
        (S,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length, or there is not one weight a cost.

    Conventions:
        Sums run in float64. prime-rl weights output tokens by 0.25, input tokens and turns by 0.1
        each, and centres the result on its group, which is `normalise_rewards` of it. A cost of 0
        throughout a group takes nothing. NaN reaches its group.

    Source:
        prime-rl, length_penalty.

    >>> rewards, costs = torch.tensor([1.0, 1.0]), torch.tensor([[10, 1], [20, 1]])
    >>> cost_penalised_rewards(rewards, costs, torch.tensor([0, 0]), weights=(0.5, 0.25))
    tensor([0.5000, 0.2500])
    """
    kernel = "cost_penalised_rewards"
    check_shapes(
        kernel, rewards=(rewards, "S"), costs=(costs, "SK"), group_index=(group_index, "S")
    )
    if costs.shape[1] != len(weights):
        raise StageError(
            f"{kernel}: {len(weights)} weights for {costs.shape[1]} costs, expected one each",
            hint="Give a weight of 0 to a cost that does not count.",
        )
    raw, groups = rewards.double(), groups_of(group_index)
    share = torch.zeros_like(raw)
    for cost, weight in zip(costs.double().unbind(1), weights, strict=True):
        largest = -groups.least(-cost)[groups.member]
        share += torch.where(largest == 0.0, 0.0, weight * cost / largest)
    return in_dtype_of(rewards, raw - groups.mean(raw)[groups.member] * share)


def kl_penalised_rewards(
    rewards: Tensor, kl: Tensor, loss_mask: Tensor, offsets: Tensor, *, kl_coef: float
) -> Tensor:
    """Take off each reward what the KL of its trained tokens costs.

        y_i = r_i - kl_coef sum_t m_t KL_t      over the tokens of i

    Args:
        rewards: (S,) float. One reward per sample.
        kl: (N,) float. An estimate of the KL divergence at each token. Nat.
        loss_mask: (N,) bool, integer or float, m. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        kl_coef: What it costs. Unit of the reward per nat.

    Returns:
        (S,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length, or `offsets` do not cover them.

    Conventions:
        Sums run in float64; what is masked never enters them. TRL's RLOO has k1 of the policy
        before the update against the reference, 0.05, after its reward_clip_range and before
        leave-one-out; its penalty may be negative. A sample without trained tokens pays nothing. A
        reward that is NaN stays so.

    Source:
        TRL, RLOOTrainer, beta; Ahmadian et al. 2024, arXiv:2402.14740.

    >>> kl, mask = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([1, 0, 1])
    >>> kl_penalised_rewards(torch.tensor([1.0]), kl, mask, torch.tensor([0, 3]), kl_coef=0.1)
    tensor([0.7500])
    """
    check_shapes("kl_penalised_rewards", rewards=(rewards, "S"), samples=(offsets.diff(), "S"))
    paid = masked_sum(kl, loss_mask, offsets)
    return in_dtype_of(rewards, rewards.double() - kl_coef * paid)

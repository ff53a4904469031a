"""Advantages of single estimators: GPG, pass@k, distillation, overrides, broadcast to tokens."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.groups import groups_of
from trajreplay.stages.kernels.normalise import normalise_rewards
from trajreplay.stages.kernels.options import check_ddof, check_positive, in_dtype_of
from trajreplay.stages.kernels.segments import check_shapes


def gpg_rewards(
    rewards: Tensor,
    group_index: Tensor,
    *,
    batch_index: Tensor | None = None,
    f_norm: float = 1.0,
    lone: str = "keep",
) -> Tensor:
    """Centre rewards on their group, and make up for the samples of the batch that score 0.

        A_i = alpha (r_i - mean_g(r)) / f_norm      alpha = B / max(count(r != 0), 1)

    Args:
        rewards: (S,) float. One reward per sample.
        group_index: (S,) int64. The group of each sample, any numbers in any order.
        batch_index: (S,) int64. The batch of each sample, of B; one batch if not given.
        f_norm: A further divisor. Dimensionless.
        lone: What a group of one scores before alpha, as in `normalise_rewards`.

    Returns:
        (S,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length, or f_norm is not more than 0.

    Conventions:
        Sums run in float64. As in verl, where a lone sample keeps its reward and alpha counts
        rewards that are not 0, while the paper counts the groups that are not constant. NaN is not
        0, and reaches its group.

    Source:
        Chu et al. 2025, GPG, arXiv:2504.02546.

    >>> gpg_rewards(torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.tensor([3, 3, 3, 3]))
    tensor([ 1.2500, -0.7500, -0.7500,  0.2500])
    """
    kernel = "gpg_rewards"
    check_positive(kernel, "f_norm", f_norm)
    batches = torch.zeros_like(group_index) if batch_index is None else batch_index
    check_shapes(
        kernel,
        rewards=(rewards, "S"),
        group_index=(group_index, "S"),
        batch_index=(batches, "S"),
    )
    centred = normalise_rewards(rewards.double(), group_index, lone=lone)
    whole = groups_of(batches)
    scoring = whole.sum((rewards != 0.0).double()).clamp(min=1.0)
    alpha = (whole.size / scoring)[whole.member]
    return in_dtype_of(rewards, alpha * centred / f_norm)


def pass_at_k_rewards(
    rewards: Tensor,
    group_index: Tensor,
    *,
    divide_by_std: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Tensor:
    """Score the best sample of each group by its lead over the second, and the others 0.

        A_i = (r_(1) - r_(2)) / (std_g(r) + epsilon) for the best i, else 0

    Args:
        rewards: (S,) float. One reward per sample.
        group_index: (S,) int64. The group of each sample, any numbers in any order.
        divide_by_std: Whether to divide.
        ddof: 0 or 1.
        epsilon: Keeps the division finite. Unit of `rewards`.

    Returns:
        (S,) in the dtype of `rewards` if that is floating, else float64. Dimensionless, or in
        their unit without division.

    Raises:
        StageError: The inputs differ in length, or a group has one sample.

    Conventions:
        Sums run in float64. As in verl, which refuses a group of one too. Where several are best
        their lead is 0, and which of them is chosen does not matter. A NaN makes its group NaN.

    Source:
        Tang et al. 2025, Optimizing language models for inference time objectives using
        reinforcement learning, arXiv:2503.19595.

    >>> pass_at_k_rewards(torch.tensor([1.0, 0.0, 0.0, 0.5]), torch.tensor([3, 3, 3, 3]))
    tensor([1.0445, 0.0000, 0.0000, 0.0000])
    """
    kernel = "pass_at_k_rewards"
    check_shapes(kernel, rewards=(rewards, "S"), group_index=(group_index, "S"))
    check_ddof(kernel, ddof)
    groups = groups_of(group_index)
    if bool((groups.size < 2).any()):
        raise StageError(
            f"{kernel}: {int((groups.size < 2).sum())} of {groups.size.numel()} groups have one "
            f"sample, expected two or more in each",
            hint="Complete the groups, or leave them out.",
        )
    raw = rewards.double()
    first = -groups.least(-raw)[groups.member]
    best = raw == first
    ties = groups.sum(best.double())[groups.member]
    others = torch.where(best, -torch.inf, raw)
    second = torch.where(ties > 1.0, first, -groups.least(-others)[groups.member])
    lead = torch.where(best & (ties == 1.0), raw - second, 0.0)
    lead = torch.where(first.isnan(), torch.nan, lead)
    if divide_by_std:
        spread = normalise_rewards(raw, group_index)
        variance = groups.sum(spread**2) / (groups.size - ddof)
        lead = torch.where(lead == 0.0, 0.0, lead / (variance.sqrt() + epsilon)[groups.member])
    return in_dtype_of(rewards, lead)


def distillation_advantages(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    advantages: Tensor | None = None,
    coefficient: float = 1.0,
) -> Tensor:
    """Pull the policy towards a teacher, token by token.

        y_t = A_t - coefficient (log pi_t - log teacher_t)

    Args:
        log_probs: (N,) float. Of the policy, as sampled or before the update. Nat.
        teacher_log_probs: (N,) float. Of the teacher at the same tokens. Nat.
        advantages: (N,) float, A; 0 if not given.
        coefficient: What a nat costs. Unit of `advantages` per nat.

    Returns:
        (N,) in the dtype of `log_probs` if that is floating, else float64. Unit of `advantages`.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        Runs in float64. slime takes it off any estimator's advantages; NeMo-RL's opd has it alone,
        and 0 at masked tokens. Masks are not looked at.

    Source:
        Lu et al. 2025, On-policy distillation, thinkingmachines.ai/blog/on-policy-distillation;
        slime, opd_kl_coef; NeMo-RL, opd.

    >>> distillation_advantages(torch.tensor([-1.0, -0.5]), torch.tensor([-0.5, -0.75]))
    tensor([ 0.5000, -0.2500])
    """
    given = {
        "log_probs": (log_probs, "N"),
        "teacher_log_probs": (teacher_log_probs, "N"),
        "advantages": (log_probs if advantages is None else advantages, "N"),
    }
    check_shapes("distillation_advantages", **given)
    pull = coefficient * (teacher_log_probs.double() - log_probs.double())
    result = pull if advantages is None else advantages.double() + pull
    return in_dtype_of(log_probs, result)


def override_advantages(advantages: Tensor, flagged: Tensor, *, advantage: float) -> Tensor:
    """Replace the advantages of the tokens of faulty messages.

        y_t = advantage where t is flagged, else A_t

    Args:
        advantages: (N,) float, A.
        flagged: (N,) bool, integer or float. Not 0 at the tokens of such a message.
        advantage: What they get. Unit of `advantages`.

    Returns:
        (N,) in the dtype of `advantages`. Their unit.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        After the estimator and before clipping, once a kind of fault: NeMo-RL does so for
        messages with an invalid tool call or malformed thinking. A flagged token may be NaN.

    Source:
        NeMo-RL, invalid_tool_call_advantage and malformed_thinking_advantage.

    >>> override_advantages(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]), advantage=-1.0)
    tensor([ 0.5000, -1.0000])
    """
    check_shapes("override_advantages", advantages=(advantages, "N"), flagged=(flagged, "N"))
    return torch.where(flagged != 0, advantage, advantages)

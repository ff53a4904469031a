"""Samples that have drifted from their policy, and the policy between two of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.masked import sample_values
from trajreplay.stages.kernels.segments import check_shapes


class OffPolicyKeep(NamedTuple):
    """Whether each token is kept, and the divergence of its sample."""

    keep: Tensor
    divergence: Tensor


def off_policy_keep(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    offsets: Tensor,
    *,
    threshold: float = 1e-4,
) -> OffPolicyKeep:
    """Keep samples of positive advantage, and others that are near their old policy.

        keep = A >= 0 or D <= threshold      D_s = mean_t(log old_t - log pi_t), trained tokens

    Args:
        log_ratio: (N,) float. Current policy to old, or to rollout. Nat.
        advantages: (N,) float. Dimensionless.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        threshold: Highest divergence of a negative advantage. Nat.

    Returns:
        keep, (N,) bool, masked tokens too; divergence, (N,) in the dtype of `log_ratio`. Nat.

    Raises:
        StageError: The inputs differ in length, or `offsets` do not cover them.

    Conventions:
        OPSM in slime and Relax (1e-4); TRL `off_policy_mask_threshold` compares with the rollout
        where there is one, and counts a log ratio of NaN as 0. What is dropped
        has loss 0 and stays in the denominators. slime's clip fraction is a sum over samples of
        dropped tokens, masked ones among them, by trained tokens: no fraction. Sums run in
        float64. A sample without trained tokens has divergence 0.

    Source:
        DeepSeek-AI 2025, DeepSeek-V3.2, off-policy sequence masking, arXiv:2512.02556.

    >>> l, offsets = torch.tensor([-0.1, -0.2, 0.3]), torch.tensor([0, 2, 3])
    >>> off_policy_keep(l, -torch.ones(3), torch.ones(3), offsets).keep
    tensor([False, False,  True])
    """
    check_shapes("off_policy_keep", log_ratio=(log_ratio, "N"), advantages=(advantages, "N"))
    divergence = sample_values(-log_ratio, mask, offsets, statistic="mean")
    return OffPolicyKeep((advantages >= 0.0) | (divergence <= threshold), divergence)


def proximal_log_probs(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    rollout_version: Tensor,
    version: Tensor | int,
) -> Tensor:
    """Interpolate the log-probabilities of the policy one update before the current one.

        log prox = log rollout + a (log pi - log rollout)
        a = clamp((v - 1 - v_rollout) / (v - v_rollout), 0, 1)

    Args:
        log_probs: (N,) float. Log-probability of each token under the current policy. Nat.
        rollout_log_probs: (N,) float. The same where it was sampled. Nat.
        rollout_version: (N,) int64. The weights that sampled each token, negative if none did.
            Optimizer step.
        version: The weights of the current policy, one number or (N,) int64. Optimizer step.

    Returns:
        (N,) in the dtype of the inputs. Nat.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        AReaL's `loglinear`: a is 0, so the rollout is the proximal policy, for tokens of the
        prompt and for tokens that are not older than the current weights. The decoupled loss is
        `clip_loss` of log_probs against these, times `importance_weights` of these against the
        rollout. a is made in float64.

    Source:
        Fu et al. 2025, AReaL, section 5.2, arXiv:2505.24298; the interpolation is AReaL's code.

    >>> versions = torch.tensor([3, -1])
    >>> proximal_log_probs(torch.tensor([-0.9, -0.9]), torch.tensor([-1.3, -1.3]), versions, 6)
    tensor([-1.0333, -1.3000])
    """
    check_shapes(
        "proximal_log_probs",
        log_probs=(log_probs, "N"),
        rollout_log_probs=(rollout_log_probs, "N"),
        rollout_version=(rollout_version, "N"),
    )
    steps = (version - rollout_version).double()
    older = (steps > 0.0) & (rollout_version >= 0)
    share = torch.where(older, (steps - 1.0) / steps, 0.0).to(log_probs.dtype)
    return rollout_log_probs + share * (log_probs - rollout_log_probs)

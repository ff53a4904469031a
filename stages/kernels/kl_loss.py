"""The KL term of a loss, token by token: every estimator, clamped, and weighted by importance."""

import torch
from torch import Tensor

from trajreplay.stages.kernels.kl import ESTIMATORS, approx_kl
from trajreplay.stages.kernels.options import check_option
from trajreplay.stages.kernels.ratio import log_ratio
from trajreplay.stages.kernels.segments import check_shapes

LOSS_ESTIMATORS = (*ESTIMATORS, "abs")


def weighted_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    *,
    estimator: str = "k3",
    weights: Tensor | None = None,
    value_clamp: tuple[float, float] | None = None,
    log_ratio_clamp: tuple[float, float] | None = None,
) -> Tensor:
    """Estimate the KL divergence from the reference, weighted to the current policy.

        y = clamp(w k(d))      d = clamp(log pi - log ref)
        abs = |d|      k1, k2, k3 as of `approx_kl`

    Args:
        log_probs: (N,) float. Log-probability of each token under the policy. Nat.
        ref_log_probs: (N,) float. The same under the reference. Nat.
        estimator: `k1`, `k2`, `k3` or `abs`.
        weights: (N,) float. w, of tokens or of samples; None for 1. Dimensionless.
        value_clamp: Lowest and highest result. Nat.
        log_ratio_clamp: Lowest and highest d. Nat.

    Returns:
        (N,) in the dtype of the inputs. Nat.

    Raises:
        StageError: The inputs differ in length, or the estimator is none of these.

    Conventions:
        The weight comes before the clamp of the result. slime and Relax `use_unbiased_kl` weigh by
        exp(log pi - log old), NeMo-RL `use_on_policy_kl_approximation` by exp(log pi - log
        rollout) with 0 where that is not finite, TRL `use_bias_correction_kl` by the ratio of its
        loss, of tokens or of samples; NeMo-RL's default weight is 1 and shapes the gradient only.
        verl alone has abs; its `k1+` and the like have the value of k1. NeMo-RL clamps d to -20
        and 20 and the result to -10 and 10 unless told otherwise; the other clamps are those of
        `approx_kl`.

    Source:
        Schulman 2020, as of `approx_kl`; the weight: DeepSeek-AI 2025, DeepSeek-V3.2,
        arXiv:2512.02556.

    >>> log_probs, ref_log_probs = torch.tensor([-2.0]), torch.tensor([-4.5])
    >>> weighted_kl(log_probs, ref_log_probs, weights=torch.tensor([0.5]))
    tensor([0.7910])
    """
    check_option("weighted_kl", "estimator", estimator, LOSS_ESTIMATORS)
    check_shapes("weighted_kl", log_probs=(log_probs, "N"), ref_log_probs=(ref_log_probs, "N"))
    if estimator == "abs":
        estimate = torch.abs(log_ratio(log_probs, ref_log_probs, clamp=log_ratio_clamp))
    else:
        estimate = approx_kl(
            log_probs, ref_log_probs, estimator=estimator, log_ratio_clamp=log_ratio_clamp
        )
    if weights is not None:
        check_shapes("weighted_kl", log_probs=(log_probs, "N"), weights=(weights, "N"))
        estimate = weights * estimate
    return estimate if value_clamp is None else estimate.clamp(*value_clamp)

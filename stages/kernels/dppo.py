"""DPPO: tokens whose probability moved too far from the rollout's are left out."""

import torch
from torch import Tensor

from trajreplay.stages.kernels.gates import GatedLoss
from trajreplay.stages.kernels.options import check_option
from trajreplay.stages.kernels.segments import check_shapes

RULES = ("by-sign", "absolute")
MEASURES = ("difference", "binary-kl")

# verl, compute_policy_loss_dppo_kl: keeps the logarithm of a complement finite.
LEAST_COMPLEMENT = 1e-8


def dppo_gate(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    rule: str = "by-sign",
    measure: str = "difference",
) -> Tensor:
    """Find the tokens whose probability moved too far from the rollout's.

        by-sign: gated = D > high and p > q if A > 0 else D > low and p < q
        absolute: gated = (D > high and p > q) or (D > low and p < q)
        difference: D = |p - q|
        binary-kl: D = q (log q - log p) + (1 - q) log((1 - q) / (1 - p))

    Args:
        log_probs: (N,) float. Log-probability of each token under the current policy, p. Nat.
        rollout_log_probs: (N,) float. The same where it was sampled, q. Nat.
        advantages: (N,) float. Dimensionless.
        low: How far a probability may fall. Unit of the measure.
        high: How far it may rise. Unit of the measure.
        rule: `by-sign` or `absolute`.
        measure: `difference` (dimensionless) or `binary-kl` (nat).

    Returns:
        (N,) bool.

    Raises:
        StageError: The inputs differ in length, or the rule or measure is none of these.

    Conventions:
        prime-rl's default is the difference by sign, its `ipo` the absolute one with 0.1 on both
        sides. verl has both measures by sign, `dppo_tv` and `dppo_kl`, adds 1e-8 to both
        complements, and compares with the old log-probs. An advantage of 0 has the bound of
        negative ones. What is on a bound is kept. Masks are not looked at.

    Source:
        DPPO 2026, arXiv:2602.04879; prime-rl, `default_loss_fn`; verl,
        `compute_policy_loss_dppo_kl`.

    >>> log_probs, rollout = torch.tensor([-0.2, -2.0]), torch.tensor([-0.6, -2.1])
    >>> dppo_gate(log_probs, rollout, torch.ones(2), measure="binary-kl", high=0.1)
    tensor([ True, False])
    """
    check_shapes(
        "dppo_gate",
        log_probs=(log_probs, "N"),
        rollout_log_probs=(rollout_log_probs, "N"),
        advantages=(advantages, "N"),
    )
    check_option("dppo_gate", "rule", rule, RULES)
    check_option("dppo_gate", "measure", measure, MEASURES)
    now, then = log_probs.exp(), rollout_log_probs.exp()
    if measure == "difference":
        rises, falls = now - then > high, now - then < -low
    else:
        complements = (1.0 - then + LEAST_COMPLEMENT) / (1.0 - now + LEAST_COMPLEMENT)
        moved = then * (rollout_log_probs - log_probs) + (1.0 - then) * complements.log()
        rises, falls = (moved > high) & (now > then), (moved > low) & (now < then)
    return rises | falls if rule == "absolute" else torch.where(advantages > 0.0, rises, falls)


def dppo_loss(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    low: float = 0.2,
    high: float = 0.2,
    rule: str = "by-sign",
    measure: str = "difference",
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> GatedLoss:
    """Score each token unless its probability moved too far from the rollout's.

        pg_loss = -(1 - gated) adv_tau A exp(l) + kl_tau l^2      l = log pi - log rollout
        gated: as of `dppo_gate`, under the rule and measure

    Args:
        log_probs: (N,) float. Log-probability of each token under the current policy. Nat.
        rollout_log_probs: (N,) float. The same where it was sampled. Nat.
        advantages: (N,) float. Dimensionless.
        low: How far a probability may fall. Dimensionless.
        high: How far it may rise. Dimensionless.
        rule: `by-sign` or `absolute`.
        measure: `difference` or `binary-kl`.
        adv_tau: Weight of the advantages. Dimensionless.
        kl_tau: Weight of the squared log-ratio. Per squared nat.

    Returns:
        Two (N,) tensors in the dtype of the inputs. Dimensionless.

    Raises:
        StageError: The inputs differ in length, or the rule is neither.

    Conventions:
        prime-rl's default; its `ipo` is the absolute rule with 0.1 on both sides. An advantage of
        0 has the bound of negative ones. The squared log-ratio is not halved, is taken against
        the rollout, and stays where the token is gated. prime-rl divides the sum over all tokens
        by their global count. Masks are not looked at.

    Source:
        prime-rl, `default_loss_fn`; DPPO 2026, arXiv:2602.04879.

    >>> log_probs, rollout = torch.tensor([-0.2, -2.0]), torch.tensor([-0.6, -2.1])
    >>> dppo_loss(log_probs, rollout, torch.ones(2)).gated
    tensor([1., 0.])
    """
    gated = dppo_gate(
        log_probs, rollout_log_probs, advantages, low=low, high=high, rule=rule, measure=measure
    )
    difference = log_probs - rollout_log_probs
    gain = torch.where(gated, 0.0, adv_tau * advantages * difference.exp())
    loss = kl_tau * difference.square() - gain
    return GatedLoss(loss, gated.to(loss.dtype))

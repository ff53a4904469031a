"""GRPO as the demo trainer computes it: float32, one sample after the other, nothing shared.

This is deliberately not the arithmetic of `trajreplay.stages`: a recorder that is checked by the
code which it recorded would find nothing.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


def normalize_rewards(raw_rewards: Sequence[float], cohorts: Sequence[Hashable]) -> list[float]:
    """Score each sample against those of its cohort, in units of their standard deviation.

    >>> normalize_rewards([1.0, 0.0, 5.0], ["a", "a", "b"])
    [0.7071057558059692, -0.7071057558059692, 0.0]
    """
    rewards = torch.tensor(raw_rewards, dtype=torch.float32)
    normalized = torch.zeros_like(rewards)
    for cohort in dict.fromkeys(cohorts):
        members = [row for row, other in enumerate(cohorts) if other == cohort]
        if len(members) > 1:
            centred = rewards[members] - rewards[members].mean()
            normalized[members] = centred / (centred.std() + 1e-6)
    return normalized.tolist()


def k3_divergence(log_ratio: Tensor) -> Tensor:
    """Estimate KL(policy || reference) of each token from `ref_log_probs - log_probs`.

    >>> k3_divergence(torch.tensor([0.0, 1.0, -1.0]))
    tensor([0.0000, 0.7183, 0.3679])
    """
    return log_ratio.exp() - 1 - log_ratio


def masked_mean(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Average over the tokens that count; zero where none does."""
    return (values * loss_mask).sum() / loss_mask.sum().clamp(min=1)


@dataclass
class LossInputs:
    """What the loss consumes of one sample: a value for each of its (T,) response tokens."""

    log_probs: Tensor
    old_log_probs: Tensor
    entropy: Tensor
    advantages: Tensor
    loss_mask: Tensor


@dataclass
class LossTerms:
    """The loss and what is reported beside it, each a scalar."""

    loss: Tensor
    pg_loss: Tensor
    entropy_loss: Tensor
    pg_clipfrac: Tensor
    ppo_kl: Tensor


def sample_loss(
    inputs: LossInputs, *, eps_clip: float, eps_clip_high: float, entropy_coef: float
) -> LossTerms:
    """Compute the clipped policy loss of one sample, averaged over its tokens that count.

    The upper bound of the ratio is wider than the lower one ("clip higher"), so that an unlikely
    token which did well may become likely.
    """
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    free = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    pg_loss = masked_mean(torch.maximum(free, clipped), inputs.loss_mask)
    entropy_loss = masked_mean(inputs.entropy, inputs.loss_mask)
    return LossTerms(
        loss=pg_loss - entropy_coef * entropy_loss,
        pg_loss=pg_loss,
        entropy_loss=entropy_loss,
        pg_clipfrac=masked_mean((clipped > free).float(), inputs.loss_mask),
        ppo_kl=masked_mean(inputs.old_log_probs - inputs.log_probs, inputs.loss_mask),
    )


def total_loss(terms: Sequence[LossTerms], denominator: int = 1) -> LossTerms:
    """Add losses up, term by term, and divide by `denominator`; zeros if there is nothing."""
    nothing = torch.zeros(())
    return LossTerms(
        **{
            term.name: sum((getattr(one, term.name) for one in terms), nothing) / denominator
            for term in fields(LossTerms)
        }
    )

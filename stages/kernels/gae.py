"""Generalised advantage estimation, and the lambda that depends on length."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.options import check_option, check_positive, in_dtype_of
from trajreplay.stages.kernels.scans import linear_scan, per_token, sample_of
from trajreplay.stages.kernels.segments import check_segments, check_shapes

GAE_RULES = ("through", "carry", "multiply")


class Gae(NamedTuple):
    """The advantage and the return of every token."""

    advantages: Tensor
    returns: Tensor


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    offsets: Tensor,
    *,
    gamma: Tensor | float = 1.0,
    lam: Tensor | float = 1.0,
    masking: str = "through",
    bootstrap: Tensor | None = None,
) -> Gae:
    """Estimate advantages from rewards and a critic.

        d_t = x_t + gamma V_{t+1} - V_t      A_t = d_t + gamma lam A_{t+1}      G_t = A_t + V_t
        with A past the last token 0, and V there the bootstrap value

        carry: V_{t+1} and A_{t+1} are those of the next unmasked token, and a masked token has
            A_t = A_{t+1}
        multiply: x_t and V_t are 0 at a masked token

    Args:
        rewards: (N,) float, x. The reward of each token.
        values: (N,) float, V. What the critic expects from each token on. Unit of `rewards`.
        loss_mask: (N,) bool, integer or float. 1 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        gamma: What one token discounts; a number or (S,) float. Dimensionless.
        lam: Lambda; a number or (S,) float. Dimensionless.
        masking: `through` (no token is masked), `carry` or `multiply`.
        bootstrap: (S,) float. The value past the last token; 0 if not given. Unit of `rewards`.

    Returns:
        Two (N,) tensors in the dtype of `rewards` if that is floating, else float64. Unit of
        `rewards`.

    Raises:
        StageError: The inputs differ in length, or there is no such rule.

    Conventions:
        Runs in float64, before any whitening. slime, Relax and TRL's PPO go `through`, verl,
        NeMo-RL and AReaL `carry`, OpenRLHF multiplies and does not skip. AReaL bootstraps a sample
        that did not end with its last value. With `carry` and `multiply` the rewards of masked
        tokens have no effect, nor have their values but on their own return in `carry`. Slime's
        scan in chunks of 128 is the same number up to rounding. NaN and infinity reach every token
        before them.

    Source:
        Schulman et al. 2015, arXiv:1506.02438, equations 11, 12 and 16.

    >>> rewards, values = torch.tensor([0.0, 0, 0, 1]), torch.tensor([0.2, 0.4, 0.6, 0.8])
    >>> gae_advantages(rewards, values, torch.ones(4), torch.tensor([0, 4]), lam=0.95).advantages
    tensor([0.7420, 0.5705, 0.3900, 0.2000])
    """
    kernel = "gae_advantages"
    check_segments(kernel, rewards, offsets)
    check_shapes(kernel, rewards=(rewards, "N"), values=(values, "N"), loss_mask=(loss_mask, "N"))
    check_option(kernel, "masking rule", masking, GAE_RULES)
    discount = per_token(kernel, "gamma", gamma, offsets)
    decay = discount * per_token(kernel, "lam", lam, offsets)
    counted, x, v, following = gae_terms(
        rewards, values, loss_mask, offsets, masking=masking, bootstrap=bootstrap
    )
    error = x + discount * following - v
    advantages = linear_scan(
        torch.where(counted, error, 0.0), torch.where(counted, decay, 1.0), offsets
    )
    return Gae(in_dtype_of(rewards, advantages), in_dtype_of(rewards, advantages + v))


def gae_terms(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    offsets: Tensor,
    *,
    masking: str,
    bootstrap: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What an error is made of: the tokens that count, rewards, values and the values after them.

    Args:
        rewards: As of `gae_advantages`, and so are the others.
        values: As there.
        loss_mask: As there.
        offsets: As there.
        masking: As there.
        bootstrap: As there.

    Returns:
        (N,) bool, and three (N,) float64.
    """
    unmasked = loss_mask != 0 if masking != "through" else torch.ones_like(loss_mask).bool()
    x, v = rewards.double(), values.double()
    if masking == "multiply":
        x, v = torch.where(unmasked, x, 0.0), torch.where(unmasked, v, 0.0)
    counted = unmasked | (masking != "carry")
    last = torch.zeros(offsets.numel() - 1) if bootstrap is None else bootstrap
    check_shapes("gae_advantages", samples=(offsets.diff(), "S"), bootstrap=(last, "S"))
    return counted, x, v, _next_values(v, counted, last.to(v), offsets)


def length_adaptive_lambda(lengths: Tensor, *, alpha: float) -> Tensor:
    """Choose a lambda that lets longer responses see further.

        lam_s = 1 - 1 / max(alpha l_s, 1)

    Args:
        lengths: (S,) integer or float, l. Response tokens of each sample.
        alpha: How fast it comes near 1. Per token.

    Returns:
        (S,) in the dtype of `lengths` if that is floating, else float64. Dimensionless.

    Raises:
        StageError: `lengths` have not one axis, or alpha is not more than 0.

    Conventions:
        Runs in float64. Responses of 1 / alpha tokens or fewer get 0. VAPO uses it for the
        policy's advantages, with alpha 0.05, and a lambda of 1 for the critic's returns: two calls
        of `gae_advantages`.

    Source:
        Yue et al. 2025, VAPO, section 4.1, arXiv:2504.05118; clamped as in NeMo-RL.

    >>> length_adaptive_lambda(torch.tensor([0, 10, 200]), alpha=0.05)
    tensor([0.0000, 0.0000, 0.9000], dtype=torch.float64)
    """
    check_shapes("length_adaptive_lambda", lengths=(lengths, "S"))
    check_positive("length_adaptive_lambda", "alpha", alpha)
    return in_dtype_of(lengths, 1.0 - 1.0 / (alpha * lengths.double()).clamp(min=1.0))


def _next_values(values: Tensor, counted: Tensor, last: Tensor, offsets: Tensor) -> Tensor:
    """Find the value of the next counted token of the same sample, else the last of the sample."""
    count, sample = values.numel(), sample_of(offsets)
    token = torch.arange(count, device=values.device)
    nearest = torch.where(counted, token, count).flip(0).cummin(0).values.flip(0)
    following = torch.cat([nearest[1:], nearest.new_full((1,), count)])[:count]
    inside = following < offsets[1:][sample]
    return torch.where(inside, values[following.clamp(max=max(count - 1, 0))], last[sample])

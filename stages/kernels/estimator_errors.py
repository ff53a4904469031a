"""What float32 may change of rewards that single rules score, or that have components."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.stages.kernels.estimators import gpg_rewards, pass_at_k_rewards
from trajreplay.stages.kernels.groups import groups_of
from trajreplay.stages.kernels.normalise_error import deviations, normalised
from trajreplay.stages.kernels.precision import FLOAT32_ROUNDOFF, accumulation_factor
from trajreplay.stages.kernels.rounded import (
    Rounded,
    constant,
    exactly,
    in_float32,
    quotient,
)

U = FLOAT32_ROUNDOFF


def gpg(
    rewards: Rounded, group_index: Tensor, *, batch_index: Tensor, f_norm: float, lone: str
) -> Rounded:
    """Score by `gpg_rewards`, with a bound of its float32 error.

        e(A) = e(c) alpha / f_norm + 4 u |A|

    Args:
        rewards: (S,), and what they may be off by.
        group_index: (S,) int64. As there, and so are the others.
        batch_index: As there.
        f_norm: As there.
        lone: As there.

    Returns:
        (S,), exact values and bounds.

    Source:
        Higham 2002, section 3.1.
    """
    value = gpg_rewards(
        rewards.value, group_index, batch_index=batch_index, f_norm=f_norm, lone=lone
    )
    batches = groups_of(batch_index)
    scoring = batches.sum((rewards.value != 0.0).double()).clamp(min=1.0)
    alpha = (batches.size / scoring)[batches.member]
    centred = normalised(rewards, group_index, lone=lone)
    return Rounded(value, centred.error * alpha / abs(f_norm) + 4.0 * U * value.abs())


def pass_at_k(
    rewards: Rounded, group_index: Tensor, *, divide_by_std: bool, ddof: int, epsilon: float
) -> Rounded:
    """Score by `pass_at_k_rewards`, with a bound of its float32 error.

        e(lead) = 2 max_g e(r) + u |lead|      e(A) as of a quotient

    Args:
        rewards: (S,), and what they may be off by.
        group_index: (S,) int64. As there, and so are the others.
        divide_by_std: As there.
        ddof: As there.
        epsilon: As there.

    Returns:
        (S,), exact values and bounds.

    Conventions:
        Where rewards are off by something, another sample may be the best by as much.

    Source:
        Higham 2002, section 3.1.
    """
    lead = pass_at_k_rewards(rewards.value, group_index, divide_by_std=False)
    groups = groups_of(group_index)
    most = -2.0 * groups.least(-rewards.error)[groups.member]
    rounding = torch.where(most == 0.0, in_float32(lead).error, U * (lead.abs() + most))
    leads = Rounded(lead, most + rounding)
    if not divide_by_std:
        return leads
    value = pass_at_k_rewards(rewards.value, group_index, ddof=ddof, epsilon=epsilon)
    # The deviation is that of the rewards, whatever is divided by it.
    least, largest = deviations(rewards, group_index, ddof=ddof, epsilon=epsilon)
    return Rounded(value, quotient(leads, least, largest, value))


def summed(components: Tensor, weights: Tensor, *, missing: str) -> Rounded:
    """Add up by `summed_rewards`, with a bound of its float32 error.

        e = f(K + 1) sum_k |w_k r_k|

    Args:
        components: (S, K) float. As there, and so are the others.
        weights: (K,) float.
        missing: As there.

    Returns:
        (S,), exact values and bounds.

    Source:
        Higham 2002, section 3.1; f: `accumulation_factor`.
    """
    unknown = components.isnan().all(1) & (components.shape[1] > 0) & (missing == "exclude")
    total = _sum(in_float32(components), weights, missing)
    return Rounded(total.value.masked_fill(unknown, torch.nan), total.error)


def decoupled(
    components: Rounded,
    weights: Tensor,
    group_index: Tensor,
    *,
    batch_index: Tensor,
    batch_epsilon: float | None,
    missing: str,
    baseline: str,
    divisor: str,
    ddof: int,
    epsilon: float,
    lone: str,
) -> Rounded:
    """Score by `decoupled_rewards`, with a bound of its float32 error.

        e(x) = sum_k |w_k| e(A_k) + f(K + 1) sum_k |w_k A_k|      e(A) as of `normalised`

    Args:
        components: (S, K), and what they may be off by. As there, and so are the others.
        weights: (K,) float.
        group_index: (S,) int64.
        batch_index: As there.
        batch_epsilon: As there.
        missing: As there.
        baseline: As there.
        divisor: As there.
        ddof: As there.
        epsilon: As there.
        lone: As there.

    Returns:
        (S,), exact values and bounds.

    Source:
        Higham 2002, section 3.1; f: `accumulation_factor`.
    """
    samples, count = components.value.shape
    member = torch.unique(group_index, return_inverse=True)[1]
    parts = member[:, None] * count + torch.arange(count, device=member.device)
    scored = normalised(
        Rounded(components.value.flatten(), components.error.flatten()),
        parts.flatten(),
        baseline=baseline,
        divisor=divisor,
        ddof=ddof,
        epsilon=epsilon,
        lone=lone,
        missing=missing,
    )
    shape = (samples, count)
    scored = Rounded(scored.value.reshape(shape), scored.error.reshape(shape))
    total = _sum(scored, weights, missing)
    unknown = components.value.isnan().all(1) & (missing == "exclude")
    if batch_epsilon is None:
        return Rounded(total.value.masked_fill(unknown, 0.0), total.error)
    return normalised(
        Rounded(total.value.masked_fill(unknown, torch.nan), total.error),
        batch_index,
        divisor="std",
        ddof=ddof,
        epsilon=batch_epsilon,
        missing=missing,
    )


def _sum(parts: Rounded, weights: Tensor, missing: str) -> Rounded:
    """(S,) The weighted sum of (S, K); what is no number counts as 0 where it is excluded."""
    zero = torch.zeros_like(parts.value)
    total, absolute = exactly(zero[:, 0]), zero.sum(1)
    inherited = absolute.clone()
    for place, weight in enumerate(weights.tolist()):
        term = Rounded(parts.value[:, place], parts.error[:, place]) * constant(weight)
        if missing == "exclude":
            term = exactly(zero[:, 0]).where(term.value.isnan(), term)
        total = total + term
        absolute, inherited = absolute + term.value.abs(), inherited + term.error
    # Where one order rounds nowhere, the terms are so few that none does.
    rounding = accumulation_factor(torch.tensor(len(weights) + 1.0)) * (absolute + inherited)
    error = torch.where(total.error == 0.0, 0.0, torch.maximum(total.error, inherited + rounding))
    return Rounded(total.value, error)

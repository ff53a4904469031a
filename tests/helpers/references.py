"""Each equation of the kernels as a plain loop over samples and tokens, in float64."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple


class Clipped(NamedTuple):
    """The clipped surrogate of every token."""

    log_ratio: list[float]
    ratio: list[float]
    pg_loss: list[float]
    clipped: list[float]


class Means(NamedTuple):
    """The masked mean of every sample."""

    mean: list[float]
    numerator: list[float]
    denominator: list[float]


def group_rewards(
    raw_rewards: Sequence[float],
    group_index: Sequence[int],
    *,
    baseline: str = "mean",
    divide_by_std: bool = True,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> list[float]:
    """Score finite rewards against their group; centred in exact fractions, so that equal is 0."""
    scored = []
    for reward, group in zip(raw_rewards, group_index, strict=True):
        members = [
            Fraction(other)
            for other, its in zip(raw_rewards, group_index, strict=True)
            if its == group
        ]
        mean = sum(members) / len(members)
        score = float(Fraction(reward) - mean) if baseline == "mean" else reward
        if divide_by_std and len(members) > ddof:
            variance = sum((member - mean) ** 2 for member in members) / (len(members) - ddof)
            score /= math.sqrt(variance) + epsilon
        scored.append(score)
    return scored


def approx_kl(
    log_probs: Sequence[float],
    ref_log_probs: Sequence[float],
    *,
    estimator: str = "k3",
    value_clamp: tuple[float, float] | None = None,
    log_ratio_clamp: tuple[float, float] | None = None,
) -> list[float]:
    """Estimate the KL divergence of every token."""
    estimates = []
    for log_prob, ref_log_prob in zip(log_probs, ref_log_probs, strict=True):
        d = log_prob - ref_log_prob
        if log_ratio_clamp is not None:
            d = _clamped(d, *log_ratio_clamp)
        if estimator == "k1":
            estimate = d
        elif estimator == "k2":
            estimate = d * d / 2
        else:
            estimate = _exp(-d) - 1 + d
        if value_clamp is not None:
            estimate = _clamped(estimate, *value_clamp)
        estimates.append(estimate)
    return estimates


def grpo_advantages(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Repeat the reward of each sample over its tokens."""
    return [reward for reward, length in zip(rewards, lengths, strict=True) for _ in range(length)]


def ppo_clip(
    log_probs: Sequence[float],
    old_log_probs: Sequence[float],
    advantages: Sequence[float],
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> Clipped:
    """Score every token by the clipped surrogate of its ratio."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    result = Clipped([], [], [], [])
    for log_prob, old, advantage in zip(log_probs, old_log_probs, advantages, strict=True):
        log_ratio = log_prob - old
        ratio = _exp(log_ratio)
        surrogate = -advantage * ratio
        bounded = -advantage * _clamped(ratio, 1 - eps_clip, 1 + high)
        undefined = math.isnan(surrogate) or math.isnan(bounded)
        result.log_ratio.append(log_ratio)
        result.ratio.append(ratio)
        result.pg_loss.append(math.nan if undefined else max(surrogate, bounded))
        result.clipped.append(float(bounded > surrogate))
    return result


def seq_mean_token_mean(
    values: Sequence[float], loss_mask: Sequence[float], lengths: Sequence[int]
) -> Means:
    """Average the trained tokens of every sample."""
    result = Means([], [], [])
    start = 0
    for length in lengths:
        numerator = count = 0.0
        for token in range(start, start + length):
            if loss_mask[token]:
                numerator += values[token]
                count += 1
        denominator = max(count, 1.0)
        result.mean.append(numerator / denominator)
        result.numerator.append(numerator)
        result.denominator.append(denominator)
        start += length
    return result


def policy_loss(
    pg_loss: Sequence[float], entropy_loss: Sequence[float], *, entropy_coef: float
) -> list[float]:
    """Take the entropy bonus off every loss."""
    return [
        loss - entropy_coef * entropy for loss, entropy in zip(pg_loss, entropy_loss, strict=True)
    ]


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


def _clamped(value: float, low: float, high: float) -> float:
    return value if math.isnan(value) else min(max(value, low), high)

"""Each equation of the policy and value losses as a plain loop over samples and tokens."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Floats = Sequence[float]


def exp(exponent: float) -> float:
    """Exponentiate without an OverflowError."""
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


def clamped(value: float, low: float = -math.inf, high: float = math.inf) -> float:
    """Hold a number within bounds; NaN stays."""
    return value if math.isnan(value) else min(max(value, low), high)


def rows(lengths: Sequence[int]) -> Iterator[range]:
    """Go through the positions of every sample."""
    start = 0
    for length in lengths:
        yield range(start, start + length)
        start += length


def statistics(
    values: Floats, mask: Floats, lengths: Sequence[int], *, statistic: str, epsilon: float = 0.0
) -> list[float]:
    """Replace every token by a statistic of the trained tokens of its sample."""
    result = []
    for row in rows(lengths):
        trained = [values[t] for t in row if mask[t]]
        count = len(trained) + epsilon if epsilon else max(len(trained), 1)
        found = {
            "sum": sum(trained),
            "mean": sum(trained) / count,
            "max": max(trained, default=0.0),
        }
        result += [values[t] if statistic == "token" else found[statistic] for t in row]
    return result


def clip_loss(
    log_ratio: float,
    advantage: float,
    *,
    low: float,
    high: float,
    dual_clip: float | None = None,
    dual_side: str = "negative",
) -> tuple[float, bool, bool]:
    """Score a token by the clipped surrogate of its ratio: loss, clipped and dual clipped."""
    ratio = exp(log_ratio)
    surrogate, bounded = -advantage * ratio, -advantage * clamped(ratio, 1 - low, 1 + high)
    loss = max(surrogate, bounded)
    if dual_clip is None:
        return loss, bounded > surrogate, False
    dual = advantage < 0 and loss > -advantage * dual_clip
    if dual_side == "both":
        loss = max(-advantage * min(ratio, dual_clip), bounded)
    elif advantage < 0:
        loss = min(loss, -advantage * dual_clip)
    return loss, bounded > surrogate, dual


def cispo_weight(
    log_ratio: float, advantage: float, *, low: float, high: float, bounds: str
) -> float:
    """Bound the ratio of a token as CISPO does."""
    ratio = exp(log_ratio)
    if bounds == "upper-absolute":
        return min(ratio, high)
    if bounds == "two-sided":
        return clamped(ratio, 1 - low, 1 + high)
    return min(ratio, 1 + high) if advantage >= 0 else max(ratio, 1 - low)


def sapo_loss(log_ratio: float, advantage: float, *, tau_pos: float, tau_neg: float) -> float:
    """Score a token by the soft gate of its ratio."""
    tau = tau_pos if advantage > 0 else tau_neg
    return -4.0 / tau * advantage / (1.0 + exp(-tau * (exp(log_ratio) - 1.0)))


def dppo_gated(
    log_prob: float,
    rollout: float,
    advantage: float,
    *,
    low: float,
    high: float,
    rule: str,
    measure: str = "difference",
) -> bool:
    """Whether the probability of a token moved too far."""
    p, q = exp(log_prob), exp(rollout)
    moved = abs(p - q)
    if measure == "binary-kl":
        moved = q * (rollout - log_prob) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    rises, falls = moved > high and p > q, moved > low and p < q
    if rule == "by-sign":
        return rises if advantage > 0 else falls
    return rises or falls


def dppo_loss(
    log_prob: float,
    rollout: float,
    advantage: float,
    *,
    adv_tau: float,
    kl_tau: float,
    **gate: Any,
) -> tuple[float, bool]:
    """Score a token unless its probability moved too far: loss and gated."""
    gated = dppo_gated(log_prob, rollout, advantage, **gate)
    gain = 0.0 if gated else adv_tau * advantage * exp(log_prob - rollout)
    return kl_tau * (log_prob - rollout) ** 2 - gain, gated


def gmpo_loss(
    log_ratio: Floats,
    advantages: Floats,
    mask: Floats,
    lengths: Sequence[int],
    *,
    low: float,
    high: float,
    epsilon: float,
) -> list[float]:
    """Score every sample by the geometric mean of its clipped ratios."""
    losses = []
    for row in rows(lengths):
        trained = [t for t in row if mask[t]]
        total = 0.0
        for t in trained:
            sign = (advantages[t] > 0) - (advantages[t] < 0)
            total += sign * min(sign * log_ratio[t], sign * clamped(log_ratio[t], -low, high))
        count = len(trained) + epsilon if epsilon else max(len(trained), 1)
        advantage = sum(advantages[t] for t in trained) / count
        losses.append(-advantage * exp(total / count))
    return losses


def vespo_loss(
    log_probs: Floats,
    log_ratio: Floats,
    advantages: Floats,
    mask: Floats,
    lengths: Sequence[int],
    *,
    rollout_weights: Floats | None = None,
) -> list[float]:
    """Weigh the log-probabilities of every sample by the gamma density of its ratio."""
    tiny = math.log(1e-8)
    losses = []
    for row in rows(lengths):
        total = 0.0
        for t in row:
            if mask[t]:
                total += clamped(log_ratio[t], -20, 20)
                if rollout_weights is not None:
                    weight = rollout_weights[t]
                    total += clamped(math.log(weight), tiny, 20) if weight else tiny
        log_weight = clamped(total, tiny, 20)
        for t in row:
            k, rate = (2.0, 3.0) if advantages[t] >= 0 else (3.0, 2.0)
            phi = exp(rate + k * log_weight - rate * exp(log_weight))
            losses.append(-phi * advantages[t] * log_probs[t])
    return losses


def kl_cov_gates(
    log_probs: Floats, advantages: Floats, tokens: Sequence[int], *, fraction: float
) -> set[int]:
    """Name the tokens of one micro-batch, given its trained ones, that KL-Cov penalises."""
    if not tokens:
        return set()
    mean_advantage = sum(advantages[t] for t in tokens) / len(tokens)
    mean_log_prob = sum(log_probs[t] for t in tokens) / len(tokens)
    covariance = {
        t: (advantages[t] - mean_advantage) * (log_probs[t] - mean_log_prob) for t in tokens
    }
    ordered = sorted(tokens, key=lambda t: -covariance[t])
    return set(ordered[: max(1, int(len(tokens) * fraction))])


def m2po_kept(log_weights: Floats, tokens: Sequence[int], *, threshold: float) -> set[int]:
    """Drop the largest squares of one micro-batch until the mean of the rest is low enough."""
    kept = sorted(tokens, key=lambda t: log_weights[t] ** 2)
    while len(kept) > 1 and sum(log_weights[t] ** 2 for t in kept) / len(kept) >= threshold:
        kept.pop()
    return set(kept)


def m2po_bounds(
    log_ratio: Floats,
    advantages: Floats,
    tokens: Sequence[int],
    *,
    budget: float,
    least: tuple[float, float] = (0.3, 0.5),
) -> tuple[float, float, float, float]:
    """Solve the bounds of one micro-batch: both widths, the moment before and after."""
    squares = sorted(
        log_ratio[t] ** 2
        for t in tokens
        if (advantages[t] > 1e-12 and exp(log_ratio[t]) > 1 + 1e-12)
        or (advantages[t] < -1e-12 and exp(log_ratio[t]) < 1 - 1e-12)
    )
    count = len(squares)
    moment = sum(squares) / max(count, 1)
    if moment <= budget + 1e-12:
        return 1.0, 99999.0, moment, moment
    tau, after = 0.0, moment
    for j, square in enumerate(squares):
        if sum(squares[: j + 1]) + (count - 1 - j) * (square - 1e-12) >= count * budget - 1e-12:
            break
        tau = math.sqrt(max(square - 1e-12, 0.0))
        after = (sum(squares[: j + 1]) + (count - 1 - j) * square) / count
    low, high = max(1 - math.exp(-tau), least[0]), max(math.exp(tau) - 1, least[1])
    return low, high, moment, after


def value_loss(
    value: float,
    target: float,
    old_value: float,
    *,
    value_clip: float | None,
    factor: float,
    huber_delta: float | None,
) -> tuple[float, bool, bool]:
    """Score a value: loss, whether the clip raised the loss, whether the value moved too far."""

    def distance(x: float) -> float:
        if huber_delta is None or abs(x) < huber_delta:
            return x * x
        return huber_delta * (2 * abs(x) - huber_delta)

    plain = distance(value - target)
    if value_clip is None:
        return factor * plain, False, False
    moved = value - old_value
    limited = distance(old_value + clamped(moved, -value_clip, value_clip) - target)
    return factor * max(plain, limited), limited > plain, abs(moved) > value_clip


def for_tokens(loss: Callable[..., float], *columns: Floats) -> list[float]:
    """Score every token by a function of its own."""
    return [loss(*token) for token in zip(*columns, strict=True)]

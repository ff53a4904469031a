"""Corrections, rejections and reductions of losses as plain loops over samples and tokens."""

import math
from collections.abc import Sequence

from tests.helpers.reference_losses import Floats, clamped, exp, rows, statistics


def importance_weights(
    log_weights: Floats,
    mask: Floats,
    lengths: Sequence[int],
    *,
    level: str,
    clamp: tuple[float, float] = (-math.inf, math.inf),
    epsilon: float = 0.0,
    undefined: float | None = None,
) -> list[float]:
    """Weigh every token by its own ratio, or the product or geometric mean of its sample's."""
    statistic = {"token": "token", "sequence": "sum", "geometric": "mean"}[level]
    exponents = statistics(log_weights, mask, lengths, statistic=statistic, epsilon=epsilon)
    weights = [exp(clamped(exponent, *clamp)) for exponent in exponents]
    return weights if undefined is None else [held(weight, undefined) for weight in weights]


def held(weight: float, undefined: float) -> float:
    """A weight, or what it becomes where float32 has no number for it."""
    return weight if abs(weight) <= 3.4028234663852886e38 else undefined


def bound_weight(weight: float, criterion: float, *, low: float, high: float, action: str) -> float:
    """Bound one weight by what it is judged by."""
    if low <= criterion <= high:
        return weight
    return 0.0 if action == "zero" else clamped(weight, low, high)


def normalised(
    weights: Floats,
    mask: Floats,
    lengths: Sequence[int],
    index: Sequence[int],
    *,
    level: str,
) -> list[float]:
    """Divide every weight by the mean of its batch, over tokens or over samples."""
    parts: dict[int, list[list[float]]] = {}
    for row, batch in zip(rows(lengths), index, strict=True):
        trained = [weights[t] for t in row if mask[t]]
        if trained:
            parts.setdefault(batch, []).append(trained)
    means = {}
    for batch, samples in parts.items():
        if level == "token":
            terms = [weight for sample in samples for weight in sample]
        else:
            terms = [sum(sample) / len(sample) for sample in samples]
        means[batch] = sum(terms) / len(terms)
    result = []
    for row, batch in zip(rows(lengths), index, strict=True):
        mean = means.get(batch, 0.0)
        result += [weights[t] / mean if mean > 1e-8 else weights[t] for t in row]
    return result


def criterion(
    log_weights: Floats,
    mask: Floats,
    lengths: Sequence[int],
    *,
    metric: str,
    statistic: str,
    reverse: bool,
    clamp: tuple[float, float] = (-math.inf, math.inf),
    epsilon: float = 0.0,
) -> list[float]:
    """Measure the divergence that every token is judged by."""
    estimates = []
    for log_weight in log_weights:
        d = clamped(-log_weight if reverse else log_weight, *clamp)
        known = {"ratio": d, "factor": exp(abs(d))}
        known |= {"k1": d, "k2": d * d / 2, "k3": exp(-d) - 1 + d}
        estimates.append(known[metric])
    found = statistics(estimates, mask, lengths, statistic=statistic, epsilon=epsilon)
    return [exp(value) for value in found] if metric == "ratio" else found


def vetoed(
    log_weights: Floats, mask: Floats, lengths: Sequence[int], *, threshold: float
) -> list[bool]:
    """Say of every token whether its sample is kept."""
    kept = []
    for row in rows(lengths):
        low = any(mask[t] and log_weights[t] < math.log(threshold) for t in row)
        kept += [not low for _ in row]
    return kept

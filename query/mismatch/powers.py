"""What is summed of near tokens: powers of d, of which every statistic is a series.

It is exact to 2e-14 of itself, cheap, and keeps the digits that exp(d) - 1 - d loses where d is
small. Sums run over whole samples, in the order of their tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.query.mismatch.tokens import Tokens

_SINH = {3: 1 / 6, 5: 1 / 120, 7: 1 / 5040, 9: 1 / 362880}


def near_powers(tokens: Tokens, far: Any) -> dict[str, Any]:
    """By sample and place: counts, powers of d by h = d * d, sinh(|d|) - |d|, and the range.

    Args:
        tokens: Tokens; what is far of them is taken out.
        far: (F,) Which of them are not near, of those that count.
    """
    near, x, d, starts = tokens.valid, tokens.x, tokens.d, tokens.starts
    for values in (near, x, d):
        values[far] = 0

    def summed(values: Any) -> Any:
        return np.add.reduceat(values, starts)

    found = {"n": summed(near.astype(np.float64)), "x": summed(x), "d1": summed(d)}
    equal = (d == 0) & near
    found["equal"] = summed(equal.astype(np.float64)) if equal.any() else np.zeros(len(starts))
    found["low"], found["high"] = _range(d, near, starts)
    h = d * d
    odd, even = d * h, h * h
    sinh, term = odd * _SINH[3], np.empty_like(d)
    found |= {"d3": summed(odd), "h1": summed(h), "h2": summed(even)}
    for power in (5, 7, 9):
        np.multiply(odd, h, out=odd)
        np.multiply(even, h, out=even)
        np.multiply(odd, _SINH[power], out=term)
        np.add(sinh, term, out=sinh)
        found[f"d{power}"] = summed(odd)
        found[f"h{(power + 1) // 2}"] = summed(even)
    found["a1"] = summed(np.abs(d, out=odd))
    found["odd_abs"] = summed(np.abs(sinh, out=sinh))
    some = np.flatnonzero(found["n"])
    return tokens.where(starts[some]) | {name: pa.array(one[some]) for name, one in found.items()}


def _range(d: Any, near: Any, starts: Any) -> tuple[Any, Any]:
    """The least and the largest difference of near tokens."""
    low, high = np.minimum.reduceat(d, starts), np.maximum.reduceat(d, starts)
    if near.all():
        return low, high
    # The zeros of other tokens hide a range on one side of 0.
    ends = np.append(starts[1:], len(d))
    for which in np.flatnonzero((low >= 0) | (high <= 0)):
        place = slice(starts[which], ends[which])
        values = d[place][near[place]]
        if len(values):
            low[which], high[which] = values.min(), values.max()
    return low, high

"""Checks of log-probs: each column by itself, and two of the same tokens against each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from trajreplay.stages.contract_checks.columns import Columns, Flags, Floats
from trajreplay.stages.report import Finding

NAMES = ("rollout_log_probs", "old_log_probs", "log_probs")
# Two columns of the same tokens, in the order in which they are made.
PAIRS = tuple(combinations(NAMES, 2))
# Tokens that a statement about a whole column needs.
ENOUGH = 24
# A column is shifted where it lies so much nearer to the other one moved by a token.
NEARER = 10.0
ABOVE = 1e-5
# Two columns are in proportion where a factor leaves less than this part of their gap.
PROPORTIONAL = 0.02
APART = 0.02
# A cheap look takes every so many tokens, and allows the two sums so much for rounding.
STRIDE = 8
ROUNDED = 1.001
# Differences between samples that are in memory at once.
AT_ONCE = 1 << 18


def check_log_probs(given: Columns) -> Iterator[Finding]:
    """Everything about log-probs."""
    held = [one for one in (*NAMES, "ref_log_probs") if given.has(one)]
    for name in held:
        values, mask = given.tokens(name), given.mask
        yield from _positive(given, name, values, mask)
        yield from _quantised(given, name, values, mask)
    for one, other in PAIRS:
        if one in held and other in held:
            yield from _pair(given, one, other)


def _positive(given: Columns, name: str, values: Floats, mask: Flags) -> Iterator[Finding]:
    if not len(values) or not np.fmax.reduce(values) > ABOVE:  # a NaN hides none
        return
    odd = ((values > ABOVE) & mask).nonzero()[0]
    if len(odd):
        message = (
            f"{name} is above 0 at {len(odd)} trained tokens, up to {values[odd].max():.4g}: a "
            "probability above 1"
        )
        yield given.at("log-prob.positive", "warning", message, int(odd[0]))


def _quantised(given: Columns, name: str, values: Floats, mask: Flags) -> Iterator[Finding]:
    """Values that a narrower dtype holds, where the producer says float32."""
    if given.dtypes.get(name, "float32") != "float32" or values.dtype != np.float32:
        return
    # Both leave the last 13 bits of a float32 at 0, and nearly always the first few values do not.
    if (values[:64].view(np.uint32) & 0x1FFF).any():
        return
    for dtype in ("bfloat16", "float16"):
        if not _fits(values, dtype):
            continue
        trained = values[mask & (values != 0)]
        if len(trained) < ENOUGH or len(np.unique(trained)) < ENOUGH // 3:
            return
        message = (
            f"every value of {name} is one of {dtype}, and its producer says float32: it was "
            "rounded on the way"
        )
        yield given.finding("log-prob.quantised", "warning", message)
        return


def _fits(values: Floats, dtype: str) -> bool:
    if dtype == "bfloat16":
        return bool((np.ascontiguousarray(values).view(np.uint32) & 0xFFFF == 0).all())
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(np.float16).astype(np.float32)
    return bool((narrow == values).all())


def _pair(given: Columns, one: str, other: str) -> Iterator[Finding]:
    """Two columns of the same tokens: what the second says of the first."""
    first, second = given.tokens(one), given.tokens(other)
    mask = given.mask
    finite = mask & np.isfinite(first) & np.isfinite(second)
    if not finite.all():
        first, second = np.where(finite, first, 0.0), np.where(finite, second, 0.0)
    yield from _filled(given, one, other, first, second, finite)
    gap = np.abs(first - second)
    count, total = int(np.count_nonzero(finite)), float(gap.sum())
    if count < ENOUGH or not total > APART * count:
        return
    near = _may_be_shifted(given, first, second, finite, total)
    shifted = list(_shifted(given, one, other, first, second, finite)) if near else []
    yield from shifted
    if shifted:
        return
    permuted = list(_permuted(given, one, other, first, second, finite))
    yield from permuted
    if not permuted:
        yield from _one_sided(given, one, other, first[finite], second[finite])


def _filled(
    given: Columns, one: str, other: str, first: Floats, second: Floats, finite: Flags
) -> Iterator[Finding]:
    """Exactly 0 in one column where the other has a real value."""
    for name, values, against in ((one, first, second), (other, second, first)):
        zero = (values == 0) & finite
        if not zero.any():
            continue
        odd = (zero & (against < -APART)).nonzero()[0]
        if len(odd):
            message = (
                f"{name} is exactly 0 at {len(odd)} trained tokens where the other log-probs are "
                f"not, first {against[odd[0]]:.4g}: a log-prob that was missing and filled in"
            )
            yield given.at("log-prob.zero", "warning", message, int(odd[0]))


def _may_be_shifted(
    given: Columns, first: Floats, second: Floats, finite: Flags, total: float
) -> bool:
    """Whether `_shifted` could find something, from a few tokens.

    What it sums over all tokens is at least what a few of them give, moved either way, and the
    gaps as recorded are at most `total`: where the few are not nearer, all are not.
    """
    later = slice(1, None, STRIDE)
    before = slice(None, len(first) - 1, STRIDE)
    starts = given.offsets[:-1][given.lengths > 0] - 1
    usable = finite[later] & finite[before]
    usable[starts[(starts >= 0) & (starts % STRIDE == 0)] // STRIDE] = False
    moves = ((first[later], second[before]), (first[before], second[later]))
    return any(
        float(np.abs(one - other)[usable].sum()) * NEARER < total * ROUNDED for one, other in moves
    )


def _shifted(
    given: Columns, one: str, other: str, first: Floats, second: Floats, finite: Flags
) -> Iterator[Finding]:
    """One column a token late or early, inside each sample or over the borders of packed ones."""
    inside = np.ones(len(first), bool)
    inside[given.offsets[:-1][given.lengths > 0]] = False  # a token with one before it
    for by, late, early in ((1, one, other), (-1, other, one)):
        # by 1: the first column at t is the second at t - 1.
        pairs = (first[1:], second[:-1]) if by == 1 else (first[:-1], second[1:])
        usable = inside[1:] & finite[1:] & finite[:-1]
        count = int(usable.sum())
        if count < ENOUGH:
            return
        moved = np.abs(pairs[0] - pairs[1])
        aligned = np.abs(first - second)[1:]
        spread = float(np.abs(np.diff(second))[usable].mean())
        near, far = float(moved[usable].mean()), float(aligned[usable].mean())
        if not (near * NEARER < far and near * NEARER < spread):
            continue
        border = ~inside[1:] & finite[1:] & finite[:-1]
        over = bool(border.any()) and float(np.median(moved[border])) * NEARER < far
        where = " over the borders of packed samples" if over else ""
        message = (
            f"{late} lies one token late against {early}{where}: the mean gap of {count} tokens is "
            f"{near:.3g} so, and {far:.3g} as recorded"
        )
        check = "log-prob.packed-shift" if over else "log-prob.shifted"
        wrong = (usable & (aligned > APART)).nonzero()[0]
        yield given.at(check, "error", message, int(wrong[0]) + 1 if len(wrong) else 0)
        return


def _permuted(
    given: Columns, one: str, other: str, first: Floats, second: Floats, finite: Flags
) -> Iterator[Finding]:
    """Samples that have the log-probs of another sample of the same length."""
    wrong: list[tuple[int, int]] = []
    by_length: dict[int, list[int]] = {}
    for row, length in enumerate(given.lengths.tolist()):
        if length >= 4:
            by_length.setdefault(length, []).append(row)
    for length, rows in by_length.items():
        if len(rows) < 2 or len(rows) > 512:
            continue
        starts = given.offsets[rows]
        index = starts[:, None] + np.arange(length)
        if not bool(finite[index].all()):
            continue
        nearest = _nearest(first[index], second[index])
        if len(set(nearest.values())) == len(nearest):
            wrong += [(rows[at], rows[best]) for at, best in nearest.items()]
    if len(wrong) >= 2:
        row, source = wrong[0]
        name = given.table["sample_id"][source].as_py()
        message = (
            f"{one} of {len(wrong)} samples are those of another sample in {other}, here of {name}"
        )
        yield given.finding("sample.permuted", "error", message, sample=row)


def _nearest(mine: Floats, theirs: Floats) -> dict[int, int]:
    """Of rows that lie so much nearer to another row of the second than to their own: which.

    A few tokens rule out nearly all: the gap over them is a part of the whole gap.
    """
    length = mine.shape[1]
    own = np.abs(mine - theirs).mean(1)
    few = slice(None, None, max(1, length // 16))
    some, others = mine[:, few], theirs[:, few]
    near: dict[int, int] = {}
    step = max(1, AT_ONCE // others.size)
    for start in range(0, len(mine), step):
        part = slice(start, start + step)
        least = np.abs(some[part, None, :] - others[None, :, :]).sum(2) / length
        np.fill_diagonal(least[:, start:], np.inf)
        maybe = least.min(1) * NEARER < own[part] * ROUNDED
        for row in (maybe.nonzero()[0] + start).tolist():
            gaps = np.abs(mine[row] - theirs).mean(1)
            best = int(gaps.argmin())
            if best != row and gaps[best] * NEARER < gaps[row]:
                near[row] = best
    return near


def _one_sided(
    given: Columns, one: str, other: str, first: Floats, second: Floats
) -> Iterator[Finding]:
    """The sampler's log-probs against the trainer's: all above, or in proportion."""
    if one != "rollout_log_probs":
        return
    gap = first.astype(np.float64) - second
    up, down = int((gap > APART).sum()), int((gap < -APART).sum())
    same = int((np.abs(gap) <= APART / 4).sum())
    slope, left = _slope(first, second)
    scaled = abs(slope - 1.0) > 0.15
    if up >= ENOUGH and not down and not (scaled and left < PROPORTIONAL):
        share = up / len(gap)
        if same * 4 > len(gap):
            message = (
                f"{one} is above {other} at {up} of {len(gap)} trained tokens, never below, and "
                f"equal at {same}: the log-prob of the most likely token, not of the sampled one"
            )
            yield given.finding("log-prob.most-likely", "warning", message)
        else:
            message = (
                f"{one} is above {other} at {up} of {len(gap)} trained tokens ({share:.0%}), by "
                f"{gap.mean():.3g} on average, and never below: log-probs over what a filter "
                "(top-p, top-k) kept"
            )
            yield given.finding("log-prob.filtered", "warning", message)
        return
    if scaled and left < 0.5:
        message = (
            f"{one} is {slope:.3g} times {other} over {len(gap)} trained tokens: one of them has "
            "another temperature"
        )
        yield given.finding("log-prob.temperature", "warning", message)


def _slope(first: Floats, second: Floats) -> tuple[float, float]:
    """The first as a multiple of the second, and the part of their gap that this leaves.

    1, nothing explained, where the multiple may be one by chance.
    """
    x, y = second.astype(np.float64), first.astype(np.float64)
    square = float((x * x).sum())
    if not square:
        return 1.0, 1.0
    slope = float((x * y).sum()) / square
    before, after = float(((y - x) ** 2).sum()), float(((y - slope * x) ** 2).sum())
    error = (after / max(len(x) - 1, 1) / square) ** 0.5
    certain = before > 0 and abs(slope - 1.0) > 8 * error
    return slope, after / before if certain else 1.0

"""Two columns of log-probs of one cohort that are far apart: shifted, permuted, in proportion."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trajreplay.stages.contract_checks.columns import Columns, Flags, Floats
from trajreplay.stages.report import Finding

SAMPLED = "rollout_log_probs"
# Tokens that a statement about a whole column needs.
ENOUGH = 24
# A column is shifted where it lies so much nearer to the other one moved by a token.
NEARER = 10.0
# Two columns are in proportion where a factor leaves less than this part of their gap.
PROPORTIONAL = 0.02
APART = 0.02
# A cheap look allows two sums so much for rounding.
ROUNDED = 1.001
# Samples of one length are compared each with each: so long, and no more than these.
SHORTEST, MOST = 4, 512
# Differences between samples that are in memory at once.
AT_ONCE = 1 << 18


def far_apart(given: Columns, one: str, other: str, *, shifted: bool) -> Iterator[Finding]:
    """What two columns of the same tokens that are far apart have to do with each other.

    Args:
        given: The cohort.
        one: The column that was made first.
        other: The other one.
        shifted: Whether one may be the other a token late or early.
    """
    first, second = given.tokens(one), given.tokens(other)
    finite = given.mask & np.isfinite(first) & np.isfinite(second)
    if not finite.all():
        first, second = np.where(finite, first, 0.0), np.where(finite, second, 0.0)
    found = list(_shifted(given, one, other, first, second, finite)) if shifted else []
    found = found or list(_permuted(given, one, other, first, second, finite))
    yield from found
    if not found:
        yield from _one_sided(given, one, other, first[finite], second[finite])


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
    long = (given.lengths >= SHORTEST).nonzero()[0]
    classes, number, sizes = np.unique(given.lengths[long], return_inverse=True, return_counts=True)
    odd = np.unique(given.owners((~finite).nonzero()[0]))
    sizes[number[np.isin(long, odd)]] = 0  # of the samples of a class, every token counts
    for which in ((sizes >= 2) & (sizes <= MOST)).nonzero()[0].tolist():
        length, rows = int(classes[which]), long[number == which]
        index = given.offsets[rows][:, None] + np.arange(length)
        nearest = _nearest(first[index], second[index])
        if len(set(nearest.values())) == len(nearest):
            wrong += [(int(rows[at]), int(rows[best])) for at, best in nearest.items()]
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
    if one != SAMPLED:
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

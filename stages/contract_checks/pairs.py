"""Two columns of log-probs of one cohort that are far apart: shifted, permuted, one steeper."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trajreplay.stages.contract_checks.columns import Columns, Flags, Floats
from trajreplay.stages.report import Finding

SAMPLED = "rollout_log_probs"
# Tokens that a statement about a whole column needs.
ENOUGH = 24
# A column of so many trained tokens, nearly all of them exactly 0, is of no sampled response.
MANY, NEARLY_ALL = 8, 0.95
# A column is shifted where it lies so much nearer to the other one moved by a token.
NEARER = 10.0
APART = 0.02
# A temperature is behind a slope so far from 1, so many errors from it, that explains so much.
STEEP = 0.1
CERTAIN = 8.0
EXPLAINED = 0.7
NEARLY = 0.05
# A slope of less than this is of a column that does not move, which no temperature makes.
FLAT = 0.01
# A cheap look allows two sums so much for rounding.
ROUNDED = 1.001
# Samples of one length are compared each with each: so long, and no more than these.
SHORTEST, MOST = 4, 512
# Tokens that tell a sample from what is recorded as its own: one or two are near to those of some
# other sample by chance.
TELLING = 4
# Samples of a length that are those of others, where they are no permutation: some of them may be
# alike, but not so many of so many.
MOVED, SHARE = 8, 0.5
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
    usable = _of_one_version(given, other, finite)
    if not found and int(usable.sum()) >= ENOUGH:
        yield from _one_sided(given, one, other, first[usable], second[usable])


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
        moved = _moved(_nearest(first[index], second[index]), len(rows))
        wrong += [(int(rows[at]), int(rows[best])) for at, best in moved.items()]
    if len(wrong) >= 2:
        row, source = wrong[0]
        name = given.table["sample_id"][source].as_py()
        message = (
            f"{one} of {len(wrong)} samples are those of another sample in {other}, here of {name}"
        )
        yield given.finding("sample.permuted", "error", message, sample=row)


def _moved(nearest: dict[int, int], size: int) -> dict[int, int]:
    """Those of some rows, each with the one that it is nearest to, that were moved about.

    They are where they only changed places, or are too many of a length for chance.
    """
    if len({*nearest.values()}) == len(nearest) >= max(MOVED, SHARE * size):
        return nearest
    kept = nearest
    while (closed := {*kept} & {*kept.values()}) != {*kept} | {*kept.values()}:
        kept = {at: best for at, best in kept.items() if at in closed and best in closed}
    return kept


def _nearest(mine: Floats, theirs: Floats) -> dict[int, int]:
    """Of rows that lie so much nearer to one other row of the second than to any: which.

    A few tokens rule out nearly all: the gap over them is a part of the whole gap.
    """
    length = mine.shape[1]
    apart = np.abs(mine - theirs)
    own = np.where((apart > APART).sum(1) >= TELLING, apart.mean(1), 0.0)
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
            best, second = np.argpartition(gaps, 1)[:2].tolist()
            if best != row and gaps[best] * NEARER < gaps[second]:
                near[row] = best
    return near


def _of_one_version(given: Columns, other: str, finite: Flags) -> Flags:
    """Tokens that the weights behind the other column sampled, as far as that is known.

    A policy that was trained in between moves its log-probs to one side, as a temperature does.
    """
    sampled, computed = given.sampled_by, given.version_of(other)
    if sampled is None or computed is None:
        return finite
    return np.asarray(finite & (sampled == computed.repeat(given.lengths)))


def _one_sided(
    given: Columns, one: str, other: str, first: Floats, second: Floats
) -> Iterator[Finding]:
    """The sampler's log-probs against the trainer's: all above, or steeper or flatter."""
    if one != SAMPLED:
        return
    if np.ptp(first) == 0 or np.mean(first == 0) >= NEARLY_ALL:
        return  # a value that was filled in
    gap = first.astype(np.float64) - second
    up, down = int((gap > APART).sum()), int((gap < -APART).sum())
    same = int((np.abs(gap) <= APART / 4).sum())
    slope = _steepness(second, first)
    chosen = same * 4 > len(gap)
    if up >= ENOUGH and not down and (chosen or slope is None):
        share = up / len(gap)
        if chosen:
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
    if slope is not None:
        hot, cold = (other, one) if slope > 1 else (one, other)
        message = (
            f"{one} moves by {slope:.3g} where {other} moves by 1, over {len(gap)} trained tokens: "
            f"{cold} is at a lower temperature than {hot}, of about {1 / slope:.2g} to 1"
        )
        yield given.finding("log-prob.temperature", "warning", message)


def _steepness(x: Floats, y: Floats) -> float | None:
    """The slope of the second over the first, where a temperature is behind it.

    At a lower temperature likely tokens become likelier and unlikely ones less likely: the line
    through both is steeper and lies above 0 where the log-prob is 0. A policy that was trained
    differs by what no line explains. A pure factor is one, too: log-probs that were multiplied.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    spread = float(((x - x.mean()) ** 2).sum())
    gap = y - x
    before = float(((gap - gap.mean()) ** 2).sum())
    if not spread or not before:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    level = float(y.mean() - slope * x.mean())
    after = float(((gap - (slope - 1.0) * x - level) ** 2).sum())
    error = (after / max(len(x) - 2, 1) / spread) ** 0.5
    certain = abs(slope - 1.0) > max(STEEP, CERTAIN * error)
    sided = (slope - 1.0) * level > -NEARLY * abs(slope - 1.0)
    moves = slope > FLAT
    return slope if moves and certain and sided and after < EXPLAINED * before else None

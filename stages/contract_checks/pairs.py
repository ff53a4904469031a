"""Two columns of log-probs of one cohort that are far apart: shifted, permuted, to one side."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trajreplay.stages.contract_checks.columns import Columns, Flags, Floats
from trajreplay.stages.contract_checks.shifts import APART, NEARER, Shifts
from trajreplay.stages.contract_checks.sides import one_sided
from trajreplay.stages.report import Finding

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


def far_apart(given: Columns, one: str, other: str) -> Iterator[Finding]:
    """What two columns of the same tokens that are far apart have to do with each other.

    Args:
        given: The cohort.
        one: The column that was made first.
        other: The other one.
    """
    first, second = given.tokens(one), given.tokens(other)
    finite = given.mask & np.isfinite(first) & np.isfinite(second)
    if not finite.all():
        first, second = np.where(finite, first, 0.0), np.where(finite, second, 0.0)
    found = list(Shifts(given, first, second, finite).find(one, other))
    found = found or list(_permuted(given, one, other, first, second, finite))
    yield from found
    if not found:
        yield from one_sided(given, one, other, finite)


def _permuted(
    given: Columns, one: str, other: str, first: Floats, second: Floats, finite: Flags
) -> Iterator[Finding]:
    """Samples that have the log-probs of another sample of the same length."""
    wrong: list[tuple[int, int]] = []
    usable = np.bincount(given.owners(finite.nonzero()[0]), minlength=len(given.lengths))
    long = (usable >= SHORTEST).nonzero()[0]
    classes, number, sizes = np.unique(given.lengths[long], return_inverse=True, return_counts=True)
    for which in ((sizes >= 2) & (sizes <= MOST)).nonzero()[0].tolist():
        length, rows = int(classes[which]), long[number == which]
        index = given.offsets[rows][:, None] + np.arange(length)
        nearest = _nearest(first[index], second[index], finite[index])
        wrong += [(int(rows[at]), int(rows[to])) for at, to in _moved(nearest, len(rows)).items()]
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


def _nearest(mine: Floats, theirs: Floats, usable: Flags) -> dict[int, int]:
    """Of rows that lie so much nearer to one other row of the second than to any: which.

    Two rows are compared over the tokens that both can be compared at, most of those of each. A few
    tokens rule out nearly all: the gap over them is a part of the whole gap.
    """
    length, counts = mine.shape[1], usable.sum(1)
    apart = np.where(usable, np.abs(mine - theirs), 0.0)
    own = np.where((apart > APART).sum(1) >= TELLING, apart.sum(1) / counts, 0.0)
    few = slice(None, None, max(1, length // 16))
    some, others, held = mine[:, few], theirs[:, few], usable[:, few]
    near: dict[int, int] = {}
    step = max(1, AT_ONCE // others.size)
    whole = bool(usable.all())
    for start in range(0, len(mine), step):
        part = slice(start, start + step)
        gaps = np.abs(some[part, None, :] - others[None, :, :])
        if not whole:
            gaps *= held[part, None, :] & held[None, :, :]
        least = gaps.sum(2) / length
        np.fill_diagonal(least[:, start:], np.inf)
        maybe = least.min(1) * NEARER < own[part] * ROUNDED
        for row in (maybe.nonzero()[0] + start).tolist():
            both = usable[row] & usable
            shared = both.sum(1)
            sums = (np.abs(mine[row] - theirs) * both).sum(1)
            enough = (shared >= TELLING) & (2 * shared >= np.maximum(counts, counts[row]))
            mean = np.where(enough, sums / np.maximum(shared, 1), np.inf)
            best, second = np.argpartition(mean, 1)[:2].tolist()
            if best != row and mean[best] * NEARER < min(mean[second], own[row]):
                near[row] = best
    return near

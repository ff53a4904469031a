"""Checks of log-probs: each column by itself, and two of the same tokens against each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from trajreplay.stages.contract_checks.columns import Flags, Floats, Found, Together, largest
from trajreplay.stages.contract_checks.pairs import (
    APART,
    ENOUGH,
    MANY,
    NEARER,
    NEARLY_ALL,
    ROUNDED,
    SAMPLED,
    SHORTEST,
    far_apart,
)
from trajreplay.stages.report import Finding

NAMES = (SAMPLED, "old_log_probs", "log_probs")
# Two columns of the same tokens, in the order in which they are made.
PAIRS = tuple(combinations(NAMES, 2))
ABOVE = 1e-5
# A cheap look takes every so many tokens, or so many of each cohort.
STRIDE = 8
FEW = 64


def check_log_probs(given: Together) -> Iterator[Found]:
    """Everything about log-probs."""
    held = [one for one in (*NAMES, "ref_log_probs") if given.has(one)]
    for name in held:
        yield from _positive(given, name)
        yield from _infinite(given, name)
        yield from _quantised(given, name)
        yield from _zero(given, name, [one for one in NAMES if one in held and one != name])
    for one, other in PAIRS:
        if one in held and other in held:
            yield from _apart(given, one, other)
            for index in range(len(given.spans)):
                yield from ((index, found) for found in _temperatures(given, index, one, other))


def _temperatures(given: Together, index: int, one: str, other: str) -> Iterator[Finding]:
    """Two columns whose producers say that they were taken at different temperatures."""
    for entry in given.block.cohorts[index].owners:
        first, second = (entry.origins.get(name) for name in (one, other))
        stated = (first and first.temperature, second and second.temperature)
        if None not in stated and stated[0] != stated[1]:
            message = (
                f"{one} was taken at temperature {stated[0]:g} and {other} at {stated[1]:g}, as "
                f"rank {entry.key.rank} says: their ratio is not 1 for equal weights"
            )
            yield given.of(index).finding("log-prob.temperature", "warning", message)
            return


def _positive(given: Together, name: str) -> Iterator[Found]:
    values = given.tokens(name)
    if not largest(values) > ABOVE:
        return
    above = values > ABOVE
    if len(given.masked):
        above &= given.mask
    for index, (start, stop) in enumerate(given.spans):
        odd, mine = above[start:stop], values[start:stop]
        count = int(np.count_nonzero(odd))
        if count:
            top = int(mine.argmax())
            highest = mine[top] if odd[top] else mine[odd].max()  # masked, or a NaN
            message = (
                f"{name} is above 0 at {count} trained tokens, up to {highest:.4g}: a "
                "probability above 1"
            )
            place = start + int(odd.argmax())
            yield given.at(index, "log-prob.positive", "warning", message, place)


def _infinite(given: Together, name: str) -> Iterator[Found]:
    """-inf at trained tokens, which the stage that reads them does not survive."""
    if given.finite(name):
        return
    never = given.trained((given.tokens(name) == -np.inf).nonzero()[0])
    for index, odd in given.by_cohort(never):
        message = (
            f"{name} is -inf at {len(odd)} trained tokens: each was sampled, and has no probability"
        )
        yield given.at(index, "log-prob.infinite", "warning", message, int(odd[0]))


def _quantised(given: Together, name: str) -> Iterator[Found]:
    """Values that a narrower dtype holds, where the producer says float32."""
    values = given.tokens(name)
    if given.dtypes.get(name, "float32") != "float32" or values.dtype != np.float32:
        return
    for index, (start, stop) in enumerate(given.spans):
        # Both leave the last 13 bits of a float32 at 0, and nearly always the first few do not.
        few = values[start : min(start + FEW, stop)].view(np.uint32)
        if np.bitwise_or.reduce(few) & 0x1FFF:
            continue
        mine = values[start:stop]
        dtype = next((one for one in ("bfloat16", "float16") if _fits(mine, one)), None)
        trained = mine[given.mask[start:stop] & (mine != 0)]
        if dtype is None or len(trained) < ENOUGH or len(np.unique(trained)) < ENOUGH // 3:
            continue
        message = (
            f"every value of {name} is one of {dtype}, and its producer says float32: it was "
            "rounded on the way"
        )
        yield index, given.of(index).finding("log-prob.quantised", "warning", message)


def _fits(values: Floats, dtype: str) -> bool:
    if dtype == "bfloat16":
        return bool((np.ascontiguousarray(values).view(np.uint32) & 0xFFFF == 0).all())
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(np.float16).astype(np.float32)
    return bool((narrow == values).all())


def _zero(given: Together, name: str, others: list[str]) -> Iterator[Found]:
    """Exactly 0 at nearly every trained token, or where another column has a real value."""
    zero = given.trained((given.tokens(name) == 0).nonzero()[0])
    for index, mine in given.by_cohort(zero):
        start, stop = given.spans[index]
        trained = int(np.count_nonzero(given.mask[start:stop]))
        if len(mine) >= max(MANY, NEARLY_ALL * trained):
            message = (
                f"{name} is exactly 0 at {len(mine)} of {trained} trained tokens: every one would "
                "be certain, so that they were not computed, or are of another column"
            )
            yield given.at(index, "log-prob.zero", "warning", message, int(mine[0]))
            continue
        for beside in (given.tokens(one)[mine] for one in others if name in NAMES):
            real = (beside < -APART) & np.isfinite(beside)
            if real.any():
                message = (
                    f"{name} is exactly 0 at {int(real.sum())} trained tokens where the other "
                    f"log-probs are not, first {beside[real][0]:.4g}: a log-prob that was missing "
                    "and filled in"
                )
                place = int(mine[real][0])
                yield given.at(index, "log-prob.zero", "warning", message, place)
                break


def _apart(given: Together, one: str, other: str) -> Iterator[Found]:
    """Cohorts in which two columns of the same tokens are far apart: what they have in common."""
    first, second = given.tokens(one), given.tokens(other)
    with np.errstate(invalid="ignore"):  # an infinity less another, which is not usable
        gap = np.abs(first - second)
    usable = given.mask
    if not given.finite(one, other):
        usable = usable & np.isfinite(first) & np.isfinite(second)
        gap[~usable] = 0.0
    elif len(given.masked):
        gap[given.masked] = 0.0
    apart: dict[int, float] = {}
    for index, (start, stop) in enumerate(given.spans):
        total, count = float(gap[start:stop].sum()), int(np.count_nonzero(usable[start:stop]))
        if count >= ENOUGH and total > APART * count:
            apart[index] = total
    if not apart:
        return
    near = _nearest_moves(given, first, second, usable)
    alike = set(_with_alike_samples(given, usable))
    for index, total in apart.items():
        # What is summed over all tokens is at least what a few of them give, moved either way:
        # where the few are not nearer than the whole gap, all are not.
        shifted = near[index] * NEARER < total * ROUNDED
        if shifted or index in alike or one == SAMPLED:
            found = far_apart(given.of(index), one, other, shifted=shifted)
            yield from ((index, finding) for finding in found)


def _with_alike_samples(given: Together, usable: Flags) -> list[int]:
    """Cohorts with samples of one length that may be permuted: every token of them counts."""
    cohorts = given.packed.cohorts.numpy()
    _, classes, sizes = np.unique(
        cohorts << 32 | given.lengths, return_inverse=True, return_counts=True
    )
    odd = given.owners((~usable).nonzero()[0])
    sizes[classes[odd]] = 0
    mine = (sizes[classes] > 1) & (given.lengths >= SHORTEST)
    found: list[int] = np.unique(cohorts[mine]).tolist()
    return found


def _nearest_moves(given: Together, first: Floats, second: Floats, usable: Flags) -> list[float]:
    """How far apart a few tokens of each cohort are, one column moved the better way by one."""
    later, before = slice(1, None, STRIDE), slice(None, len(first) - 1, STRIDE)
    counted = usable[later] & usable[before]
    starts = given.offsets[:-1][given.lengths > 0] - 1
    counted[starts[(starts >= 0) & (starts % STRIDE == 0)] // STRIDE] = False
    pairs = (first[later], second[before]), (first[before], second[later])
    with np.errstate(invalid="ignore"):  # as above
        moves = [np.where(counted, np.abs(one - other), 0.0) for one, other in pairs]
    cuts = [(bound + STRIDE - 2) // STRIDE for bound in given.packed.token_bounds]
    return [min(float(one[start:stop].sum()) for one in moves) for start, stop in pairwise(cuts)]

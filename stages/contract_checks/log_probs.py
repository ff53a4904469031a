"""Checks of log-probs: each column by itself, and two of the same tokens against each other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np

from trajreplay.stages.contract_checks.columns import Floats, Found, Together, largest
from trajreplay.stages.contract_checks.pairs import far_apart
from trajreplay.stages.contract_checks.shifts import APART, ENOUGH
from trajreplay.stages.contract_checks.sides import MANY, NEARLY_ALL, SAMPLED
from trajreplay.stages.report import Finding

NAMES = (SAMPLED, "old_log_probs", "log_probs")
# Two columns of the same tokens, in the order in which they are made.
PAIRS = tuple(combinations(NAMES, 2))
ABOVE = 1e-5
# A cheap look takes so many tokens of each rank.
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
    told = set[int]()
    for index, rank, start, stop in _pieces(given):
        # Both leave the last 13 bits of a float32 at 0, and nearly always the first few do not.
        few = values[start : min(start + FEW, stop)].view(np.uint32)
        if index in told or np.bitwise_or.reduce(few) & 0x1FFF:
            continue
        mine = values[start:stop]
        dtype = next((one for one in ("bfloat16", "float16") if _fits(mine, one)), None)
        trained = given.mask[start:stop] & (mine != 0)
        real = mine[trained]
        if dtype is None or len(real) < ENOUGH or len(np.unique(real)) < ENOUGH // 3:
            continue
        told.add(index)
        where = "" if rank is None else f" of rank {rank}"
        message = (
            f"every value of {name}{where} is one of {dtype}, and its producer says float32: it "
            "was rounded on the way"
        )
        place = start + int(trained.argmax())
        yield given.at(index, "log-prob.quantised", "warning", message, place)


def _pieces(given: Together) -> Iterator[tuple[int, int | None, int, int]]:
    """The tokens of each cohort, and then of each rank of those that have several."""
    ranks, cohorts = given.packed.ranks, given.packed.cohorts.numpy()
    for index, (start, stop) in enumerate(given.spans):
        yield index, None, start, stop
    new = (ranks[1:] != ranks[:-1]) | (cohorts[1:] != cohorts[:-1])
    cuts = [0, *(new.nonzero()[0] + 1).tolist(), len(ranks)]
    bounds = given.packed.sample_bounds
    for one, other in pairwise(cuts):
        index = int(cohorts[one]) if one < other else -1
        if index >= 0 and (one, other) != (bounds[index], bounds[index + 1]):
            yield index, int(ranks[one]), int(given.offsets[one]), int(given.offsets[other])


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
    rows = (given.lengths > 0).nonzero()[0]
    if not len(rows):
        return
    starts = given.offsets[:-1][rows]
    totals = np.add.reduceat(gap, starts, dtype=np.float64)
    counts = np.add.reduceat(usable, starts, dtype=np.int64)
    apart = rows[(totals > APART * counts) & (counts > 0)]
    for index, _ in given.by_cohort(apart, samples=True):
        start, stop = given.spans[index]
        if int(np.count_nonzero(usable[start:stop])) >= ENOUGH:
            yield from ((index, found) for found in far_apart(given.of(index), one, other))

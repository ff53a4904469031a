"""How a hypothesis fits what was recorded: how much it gives, and whether that proves anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.sparing import Key, Values, same
from trajreplay.stages.counterfactuals.variants import Variant, changed_settings
from trajreplay.stages.explain.target import Lost, Target, proves
from trajreplay.stages.explain.trying import joined, tried
from trajreplay.stages.faults import Fault, Told
from trajreplay.stages.losses.least_wrong import continuous_scalars

# How much of what the settings miss by a value may be off that only a bound of rounding lets
# through: next to nothing; or less than half of it, where a token on a bound is counted or not.
SURE, COUNTED = 1e-2, 0.5
# Values that have to differ before pairs, or counts alone, prove anything: a few fit by chance.
EVIDENCE = 3
# Scalars that count tokens: of the few values that one can have, chance gives many.
COUNTS = ("pg_clipfrac", "value_clipfrac")


@dataclass(frozen=True, eq=False)
class Fit:
    """How a hypothesis fits.

    Args:
        told: What it was.
        order: Its place in the catalogue.
        values: Recorded values.
        agree: Those of them that it gives. Not those that only a bound lets through which are off
            by much of what the settings miss by: a divisor near 0 has a bound that holds anything.
        max_error: The largest error of these.
        undecided: How many agree only within a bound.
        right: The fields that it gives throughout.
        moves: The fields of which it recomputes anything else than the settings do.
        repaired: The fields that it gives and the settings do not.
        moved_at: (E,) bool each. By field, the values that it moves.
        right_at: (E,) bool each. By field, the values that it gives.
        where: The ranks that it happened to, in words; empty where it happened to all.
    """

    told: tuple[tuple[Fault, Told], ...]
    order: int
    values: int
    agree: int
    max_error: float
    undecided: int
    right: frozenset[Key]
    moves: frozenset[Key]
    repaired: frozenset[Key]
    moved_at: Mapping[Key, Tensor]
    right_at: Mapping[Key, Tensor]
    where: str = ""

    @property
    def faults(self) -> tuple[str, ...]:
        """The ids of its faults."""
        return tuple(fault.id for fault, _ in self.told)

    @property
    def reproduces(self) -> bool:
        """Whether it gives all of it."""
        return self.agree == self.values

    @property
    def moved(self) -> bool:
        """Whether it changes anything."""
        return bool(self.moves)

    @property
    def rank(self) -> tuple[int, int, float]:
        """Fits of lower rank are believed first: exact before bounded, then as in the catalogue."""
        return int(self.undecided > 0), len(self.told), self.order


def can_join(one: Fit, other: Fit, wrong: frozenset[Key]) -> bool:
    """Whether two faults can be all that is wrong.

    A field that one of them alone moves is what that one makes of it; one that neither moves is
    what the settings make of it. So are most values of a field that both move; not all, since two
    changes may meet in values that one alone leaves as they are, such as those of a clip.
    """
    mine, theirs = one.moves - other.moves, other.moves - one.moves
    if wrong - one.moves - other.moves or not (mine <= one.right and theirs <= other.right):
        return False
    return all(
        _mostly(one.right_at[key], one.moved_at[key] & ~other.moved_at[key])
        and _mostly(other.right_at[key], other.moved_at[key] & ~one.moved_at[key])
        for key in one.moves & other.moves
    )


def _mostly(right: Tensor, of: Tensor) -> bool:
    """Whether at least half of some values are right."""
    count = int(of.sum())
    return not count or 2 * int((right & of).sum()) >= count


def contradict(one: Fit, other: Fit) -> bool:
    """Whether two faults change one thing in two ways: of these, only one can have happened."""
    (mine,), (theirs,) = ([told.variant for _, told in fit.told] for fit in (one, other))
    same = {*mine.settings} & {*theirs.settings}
    return (
        one.faults == other.faults
        or (mine.arithmetic is not None and theirs.arithmetic is not None)
        or not {*mine.columns}.isdisjoint(theirs.columns)
        or not {*mine.scales}.isdisjoint(theirs.scales)
        or any(mine.settings[name] != theirs.settings[name] for name in same)
    )


def fit_pair(target: Target, one: Fit, other: Fit) -> Fit | None:
    """Both at once, where they give all of it."""
    if contradict(one, other):
        return None
    return fit_of(target, (*one.told, *other.told), one.order + other.order, whole=True)


def fit_of(
    target: Target, told: tuple[tuple[Fault, Told], ...], order: int, *, whole: bool = False
) -> Fit | None:
    """How some faults at once, each told in one way, fit what is recorded.

    Args:
        target: What is recorded.
        told: The faults, and how each changes it.
        order: Their place in the catalogue.
        whole: Whether a part that they give is of no interest.

    Returns:
        None where they cannot be tried, or do not give every field that is recorded.
    """
    block, stage = target.block, target.stage
    taken = sum(one.taken for _, one in told)
    if not proves(taken, target.differ):
        return None
    share = _shares(block, stage, joined(told))
    lost = Lost(target, share)
    found = tried(block, stage, told, target.failed, lost)
    if found is None or (whole and lost.fields):
        return None
    by_key = {one.key: one for one in found}
    agree, undecided, errors = 0, 0, [0.0]
    right, moves, repaired = set[Key](), set[Key](), set[Key]()
    moved_at, right_at = dict[Key, Tensor](), dict[Key, Tensor]()
    for one in target.base:
        other = by_key.get(one.key)
        # A fault changes what is right; recorded values that it changes, too, prove nothing.
        if other is None or len(other.recorded) != len(one.recorded):
            return None
        if not bool(same(other.recorded, one.recorded).all()):
            return None
        wide = target.wide(one.key, other.recorded, other.recomputed, share(one.field))
        fits = one.counts & ~wide & _agree(one, other, spared=bool(lost.fields))
        agree += int(fits.sum())
        undecided += other.undecided
        errors.append(largest_error(other, fits))
        moved_at[one.key] = one.counts & ~same(other.recomputed, one.recomputed)
        right_at[one.key] = fits
        if bool(moved_at[one.key].any()):
            moves.add(one.key)
        if bool((one.counts & ~fits).any()):
            continue
        right.add(one.key)
        if one.differs:
            repaired.add(one.key)
    values = sum(int(one.counts.sum()) for one in target.base)
    sets = frozenset(right), frozenset(moves), frozenset(repaired)
    return Fit(told, order, values, agree, max(errors), undecided, *sets, moved_at, right_at)


def _agree(one: Values, other: Values, *, spared: bool) -> Tensor:
    """(E,) bool. Values that agree with a hypothesis.

    Where these were spared their bounds, what is not moved agrees as with the settings, and what
    is far nearer than the hypothesis moves it does agree.
    """
    if not spared:
        return ~other.disagree
    error = (other.recorded - other.recomputed).abs()
    near = error <= SURE * (other.recomputed - one.recomputed).abs()
    unmoved = same(other.recomputed, one.recomputed)
    return torch.where(unmoved, ~one.disagree, ~other.disagree | near)


def resting_on_counts(base: Sequence[Values]) -> int:
    """How many values disagree where these are few and only count tokens; else 0.

    Args:
        base: What is recorded of a stage, and what the settings give.
    """
    wrong = {one.field: 0 for one in base if one.differs}
    if not wrong or not {*wrong} <= {*COUNTS}:
        return 0
    differ = sum(int(one.wrong.sum()) for one in base)
    return differ if differ < EVIDENCE else 0


def _shares(block: Block, stage: str, variant: Variant) -> Callable[[str], float]:
    """By field, how much of a miss an error may be that only a bound allows."""
    if not stage.startswith("loss."):
        return lambda name: SURE
    settings = changed_settings(block.settings, variant.settings)
    continuous = continuous_scalars(settings.loss) if stage == "loss.policy" else ("value_loss",)
    return lambda name: SURE if name.partition(".")[0] in continuous else COUNTED


def largest_error(one: Values, where: Tensor) -> float:
    """The largest error of some values; a NaN that is recorded and recomputed is none."""
    error = (one.recorded - one.recomputed).abs()[where]
    error = error[~(one.recorded[where].isnan() & one.recomputed[where].isnan())]
    return float(error.max()) if len(error) else 0.0

"""Known ways to hand a stage a wrong column: another one, one that is shifted, one that is scaled.

Whatever a stage reads can be wrong, so that each of these goes over the columns that it does read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.earlier import LOG_PROBS
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import Told, Tries, held
from trajreplay.stages.faults.solved import Misses
from trajreplay.stages.faults.tokens import shifted

_USUAL = frozenset({0.5, 0.6, 0.7, 0.8, 0.9, 1.2})
_COLD = tuple(number / 100 for number in range(20, 101))
_HOT = tuple(number / 100 for number in range(100, 301))


def read_by(block: Block, stage: str, names: Sequence[str]) -> list[str]:
    """Those of some columns that a stage of a cohort reads."""
    own = block.cohorts[0].abilities.get(stage)
    return [one for one in names if own is not None and one in own.reads and held(block, one)]


def other_columns(stage: str, others: Sequence[str] = LOG_PROBS) -> Tries:
    """Tries of log-probs of another model or time in the place of each that a stage reads."""

    def tries(block: Block) -> Iterable[Told]:
        for target in read_by(block, stage, LOG_PROBS):
            for other in others:
                if other != target and held(block, other):
                    values = block.packed.tokens(other)
                    yield Told(Variant(columns={target: values}), f"{other} for {target}")

    return tries


def stale_columns(stage: str) -> Tries:
    """Tries of what was captured of the same samples before, in the place of what a stage reads."""

    def tries(block: Block) -> Iterable[Told]:
        for target in read_by(block, stage, LOG_PROBS):
            for (name, when), values in block.cohorts[0].earlier.items():
                # A reference is one model at all times, and stands for no other one.
                if (name == "ref_log_probs") == (target == "ref_log_probs"):
                    yield Told(Variant(columns={target: values}), f"{name} of {when} for {target}")

    return tries


def shifted_columns(stage: str, names: Sequence[str]) -> Tries:
    """Tries of a token column shifted by a token, of some that a stage may read."""

    def tries(block: Block) -> Iterable[Told]:
        for name in read_by(block, stage, names):
            for by, word in ((1, "late"), (-1, "early")):
                values = shifted(block.packed.tokens(name), block.packed.offsets, by)
                yield Told(Variant(columns={name: values}), f"{name} one token {word}")

    return tries


def temperatures(stage: str, fields: Sequence[str]) -> Tries:
    """Tries of a temperature on one side: usual ones, stated ones, and such as give what is there.

    Args:
        stage: The stage.
        fields: What shows a temperature, the first of these that differs.
    """

    def tries(block: Block) -> Iterable[Told]:
        stated = {
            origin.temperature
            for entry in block.cohorts[0].owners
            for origin in entry.origins.values()
            if origin.temperature
        }
        names = read_by(block, stage, LOG_PROBS)
        for value in sorted({*_USUAL, *stated, *(1 / one for one in stated)} - {1.0}):
            for name in names:
                yield _divided(block, name, value)
        misses = Misses(block, stage, fields) if names else None
        for name in names if misses is not None else ():
            for grid in (_COLD, _HOT):
                change = lambda one, name=name: _divided(block, name, one).variant  # noqa: E731
                for one in misses.between(change, grid) if misses is not None else ():
                    if one != 1.0:
                        yield _divided(block, name, one)

    return tries


def _divided(block: Block, name: str, by: float) -> Told:
    scaled = block.packed.tokens(name) / by
    return Told(Variant(columns={name: scaled}), f"{name} divided by {by:g}")

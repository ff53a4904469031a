"""Parameters that are solved for: with which a stage would give what it recorded."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch

from trajreplay.schema.errors import TrajReplayError
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant, varied
from trajreplay.stages.faults.fault import Told, Tries, setting

# Numbers as people choose them: of two digits.
TWO_DIGITS = tuple(
    float(f"{digits}e{power}") for power in range(-11, 1) for digits in range(10, 100)
)
SHARES = tuple(sorted({*(number / 100 for number in range(1, 101)), 0.995, 0.999, 0.9999}))
# A number that was solved for is one of people's where it is so near to it, in parts of itself.
NEAR = 1e-3

Change = Callable[[float], Variant]


class Misses:
    """What variants of a cohort miss a recorded value by.

    Args:
        block: The cohort.
        stage: The stage.
        fields: The field that the value is of: the first of these that differs.

    Attributes:
        wrong: The fields that differ, without what is recorded beside a scalar.
    """

    def __init__(self, block: Block, stage: str, fields: Sequence[str]) -> None:
        self._block, self._stage = block, stage
        self._at: tuple[tuple[str, str], int] | None = None
        self.wrong: frozenset[str] = frozenset()
        # What only a bound lets through differs by rounding: nothing of it is to be solved.
        found = {one.key: one for one in self._values(Variant(), bounded=True)}
        off = {key: (one.recorded - one.recomputed).abs() for key, one in found.items()}
        off = {
            key: torch.where(found[key].disagree & found[key].counts & gap.isfinite(), gap, 0.0)
            for key, gap in off.items()
        }
        differing = {key: gap for key, gap in off.items() if bool((gap > 0).any())}
        self.wrong = frozenset(name.partition(".")[0] for name, _ in differing)
        chosen = next((key for name in fields for key in differing if key[0] == name), None)
        if chosen is not None:
            self._at = chosen, int(differing[chosen].argmax())

    def _values(self, variant: Variant, *, bounded: bool = False) -> list[Any]:
        from trajreplay.stages.counterfactuals.values import recompute

        spared = None if bounded else lambda *given: True
        try:
            block = varied(self._block, variant, (self._stage,))
            return list(recompute(block, self._stage, hopeless=spared))
        except (TrajReplayError, KeyError):
            return []

    def of(self, variant: Variant) -> float:
        """What it misses the value by, with its sign; NaN where it does not give it."""
        for one in self._values(variant) if self._at is not None else []:
            if self._at is not None and one.key == self._at[0]:
                return float(one.recomputed[self._at[1]] - one.recorded[self._at[1]])
        return math.nan

    def linear(self, change: Change, own: float) -> Iterator[tuple[float, int]]:
        """The parameter that the value is linear in: as people choose it, and as it is.

        Args:
            change: The variant of a parameter.
            own: The parameter in force.

        Yields:
            A parameter, and how many numbers of it are read off what is recorded: none where it
            has no more than two digits, which no arbitrary value gives.
        """
        first, second = self.of(change(own)), self.of(change(own + 1.0))
        if not math.isfinite(first) or not math.isfinite(second) or first == second:
            return
        exact = own - first / (second - first)
        short = float(f"{exact:.2g}")
        if abs(short - exact) <= NEAR * abs(exact):
            yield short, 0
        else:
            yield exact, 1

    def between(
        self, change: Change, grid: Sequence[float], turns: Sequence[float] = ()
    ) -> Iterator[float]:
        """The parameters of a grid between which the value lies.

        Args:
            change: The variant of a parameter.
            grid: Parameters, in order.
            turns: Where the value may turn round; between these it moves one way, or rests.

        Yields:
            Two for each part in which it passes the value, and ends of parts that give it: a part
            in which it rests on the value passes it by rounding alone.
        """
        beside = {bisect_left(grid, one) + by for one in turns for by in (-1, 0, 1)}
        places = sorted({0, len(grid) - 1, *(one for one in beside if 0 <= one < len(grid))})
        missed = [self.of(change(grid[one])) for one in places]
        if not all(map(math.isfinite, missed)):
            return
        most = max(map(abs, missed))
        found = {one for one, miss in zip(places, missed, strict=True) if abs(miss) <= NEAR * most}
        for (start, first), (stop, last) in pairwise(zip(places, missed, strict=True)):
            if (first > 0) != (last > 0):
                up = last > 0
                place = bisect_left(
                    grid,
                    True,
                    start,
                    stop,
                    key=lambda one, up=up: (self.of(change(one)) > 0) == up,  # type: ignore[misc]
                )
                found |= {max(place - 1, 0), place}
        yield from (grid[one] for one in sorted(found))


def solved(name: str, stage: str, fields: Sequence[str], grid: Sequence[float]) -> Tries:
    """Tries of a number that a setting may have had instead, if a stage moves one way with it."""

    def tries(block: Block) -> Iterable[Told]:
        own = setting(block, name)
        if own is None:
            return
        for one in Misses(block, stage, fields).between(lambda one: Variant({name: one}), grid):
            if one != own:
                yield Told(Variant({name: one}), f"{one:g}")

    return tries


def solved_bounds(name: str, stage: str, fields: Sequence[str], grid: Sequence[float]) -> Tries:
    """Tries of other bounds of a stage: of one on both sides, or of another one on one side."""

    def tries(block: Block) -> Iterable[Told]:
        own = setting(block, name)
        ways: list[Callable[[float], tuple[float, float]]] = [lambda one: (-one, one)]
        if own is not None:
            ways += [lambda one: (own[0], one), lambda one: (-one, own[1])]
        misses = Misses(block, stage, fields)
        for way in ways:
            for one in misses.between(lambda one, way=way: Variant({name: way(one)}), grid):  # type: ignore[misc]
                low, high = way(one)
                if (low, high) != own and low <= high:
                    yield Told(Variant({name: (low, high)}), f"{low:g} and {high:g}")

    return tries


def together(*several: Tries) -> Tries:
    """Tries of all of some, each once."""

    def tries(block: Block) -> Iterable[Told]:
        seen: set[str] = set()
        for one in several:
            for told in one(block):
                if told.detail not in seen:
                    seen.add(told.detail)
                    yield told

    return tries

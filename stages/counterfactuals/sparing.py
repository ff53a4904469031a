"""Recorded beside recomputed values: held against their bounds, or spared these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.schema.policy import Tolerance
from trajreplay.stages.compare import beyond
from trajreplay.stages.losses.scalars import Scalar

_LEAST = sys.float_info.min


Key = tuple[str, str]  # a field, and what of it has a value
# Says of a field, and of its recorded and recomputed values, that no bound can save them all.
Hopeless = Callable[[Key, Tensor, Tensor], bool]


@dataclass(frozen=True)
class Values:
    """What is recorded of one field of a stage, and what it should be.

    Args:
        field: The column or scalar.
        per: What has a value: sample, token, or the scalar itself.
        recorded: (E,) float64.
        recomputed: (E,) float64.
        disagree: (E,) bool. Beyond every bound; a NaN agrees with a NaN here.
        counts: (E,) bool. Values that count: those of trainable tokens.
        undecided: How many agree only within the bound that float32 allows.
        places: Where each scalar is from: rank, and micro-batch in brackets; empty otherwise.
        samples: (E,) int64. The packed sample of each value; of scalars -1.
    """

    field: str
    per: str
    recorded: Tensor
    recomputed: Tensor
    disagree: Tensor
    counts: Tensor
    undecided: int
    places: tuple[str, ...]
    samples: Tensor

    @property
    def wrong(self) -> Tensor:
        """(E,) bool. Values that count and disagree."""
        return self.disagree & self.counts

    @property
    def differs(self) -> bool:
        """Whether one of them does."""
        return bool(self.wrong.any())

    @property
    def key(self) -> Key:
        """What tells it from the other values of a stage: a field may be recorded of several."""
        return self.field, self.per


@dataclass(frozen=True)
class Row:
    """A part of what is recorded of a field, of which nothing is said yet.

    Args:
        recorded: (K,) float64.
        recomputed: (K,) float64.
        samples: (K,) int64. The packed sample of each; -1 of a scalar over several.
        tolerance: What is a pass.
        compare: Gives those beyond every bound, (K,) bool, and how many agree within one alone.
        counts: (K,) bool. Values that count; None where all do.
        places: Where a scalar over several is from.
        scalar: That scalar.
    """

    recorded: Tensor
    recomputed: Tensor
    samples: Tensor
    tolerance: Tolerance
    compare: Callable[[], tuple[Tensor | None, int]]
    counts: Tensor | None = None
    places: tuple[str, ...] = ()
    scalar: Scalar | None = None

    def judged(self, *, spared: bool) -> tuple[Tensor, int]:
        """(K,) bool. Those that disagree, and how many agree within a bound alone."""
        if spared:
            error = (self.recorded - self.recomputed).abs_()
            return beyond(error, self.recomputed, self.tolerance), 0
        disagree, undecided = self.compare()
        if disagree is None:
            disagree = torch.zeros(len(self.recorded), dtype=torch.bool)
        return disagree, undecided


def judged(fields: Mapping[Key, Sequence[Row]], hopeless: Hopeless | None) -> list[Values]:
    """Hold what is recorded of a stage against what it should be.

    Args:
        fields: By field, the parts of it.
        hopeless: Says which fields no bound saves; where there is one, or a scalar is so far off
            that no rounding is behind it, no value gets its bound. None: all get it.
    """
    joined = {
        key: [
            torch.cat([getattr(row, part) for row in rows]) if len(rows) > 1 else one
            for part in ("recorded", "recomputed", "samples")
            for one in [getattr(rows[0], part)]
        ]
        for key, rows in fields.items()
    }
    spared = False
    if hopeless is not None:
        lost = [hopeless(key, *pair) for key, (*pair, _) in joined.items()]
        scalars = [row.scalar for rows in fields.values() for row in rows]
        spared = any(lost) or _is_wrong([one for one in scalars if one is not None])
    found = []
    for key, rows in fields.items():
        recorded, recomputed, samples = joined[key]
        parts = [row.judged(spared=spared) for row in rows]
        disagree = torch.cat([one for one, _ in parts])
        counts = torch.ones(len(recorded), dtype=torch.bool)
        if rows[0].counts is not None:
            counts = torch.cat([row.counts for row in rows if row.counts is not None])
        found.append(
            Values(
                *(*key, recorded, recomputed, disagree & ~same(recorded, recomputed), counts),
                sum(count for _, count in parts),
                tuple(place for row in rows for place in row.places),
                samples,
            )
        )
    return found


def same(one: Tensor, other: Tensor) -> Tensor:
    """(E,) bool. Values that are equal, NaN to NaN."""
    return (one == other) | (one.isnan() & other.isnan())


def _is_wrong(scalars: Sequence[Scalar]) -> bool:
    """Whether one is off by more than any rounding, which no bound has to be made to see."""
    outside = [one for one in scalars if one.divergence.abs_error > _limit(one)]
    # The worst first: it shows most often, and one is enough.
    outside.sort(key=lambda one: -one.divergence.abs_error / max(_limit(one), _LEAST))
    return any(one.divergence.abs_error > one.least_wrong() for one in outside)


def _limit(one: Scalar) -> float:
    return one.tolerance.atol + one.tolerance.rtol * abs(one.divergence.recomputed)

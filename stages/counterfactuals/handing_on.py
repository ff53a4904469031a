"""What rollouts hand on to the steps that consumed them, where it is recomputed otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from trajreplay.query import Cohort
from trajreplay.schema.columns import has_column
from trajreplay.stages.block import Block
from trajreplay.stages.replaying.whole import WholeCohorts

# Columns that a step takes over from the rollouts that it consumed from.
HANDED_ON = ("reward", "kl", "advantages", "returns")


@dataclass(frozen=True)
class Handed:
    """What a rollout recomputed under the settings in force, and under the others.

    Columns that the others change, and that could not be recomputed under them, are lost.
    """

    sample_ids: pa.Array
    offsets: Tensor
    sides: tuple[dict[str, Tensor], dict[str, Tensor]]
    lost: frozenset[str] = frozenset()


class Handover:
    """What rollouts hand on to steps, each kept until the last of them that is asked for.

    Args:
        cohorts: The cohorts.
        order: Those that are recomputed, in this order.
    """

    def __init__(self, cohorts: WholeCohorts, order: Sequence[Cohort]) -> None:
        self._kept: dict[Cohort, Handed] = {}
        self._sources = {place: cohorts.sources_of(place) for place in order}
        last = {source: place for place in order for source in self._sources[place]}
        self._released: dict[Cohort, list[Cohort]] = {}
        for source, place in last.items():
            self._released.setdefault(place, []).append(source)
        self._awaited = frozenset(last)

    def keep(self, place: Cohort, one: Handed) -> None:
        """Keep what a cohort hands on, if any asks for it."""
        if place not in self._awaited:
            return
        now, then = one.sides
        for name in {*now} & {*then}:
            if torch.equal(now[name], then[name]):
                then[name] = now[name]  # what does not change is kept once
        self._kept[place] = one

    def of(self, place: Cohort) -> dict[Cohort, Handed]:
        """What a step takes over, by rollout."""
        return {one: self._kept[one] for one in self._sources[place] if one in self._kept}

    def done(self, place: Cohort) -> None:
        """Forget what nobody after this cohort takes over."""
        for source in self._released.get(place, ()):
            self._kept.pop(source, None)


def taken_over(block: Block, handed: Mapping[Cohort, Handed], at: int) -> dict[str, Tensor]:
    """What the rollouts that a step consumed from hand on, in the place of what it recorded."""
    table = block.packed.table
    if not has_column(table, "source_rollout_id"):
        return {}
    (cohort,) = block.cohorts
    report = cohort.report
    pairs = np.stack([table[name].to_numpy() for name in ("source_attempt", "source_rollout_id")])
    found: dict[str, Tensor] = {}
    for attempt, rollout in np.unique(pairs, axis=1).T.tolist():
        source = handed.get(Cohort(report.run_id, attempt, rollout, None))
        if source is None:
            continue
        rows = ((pairs[0] == attempt) & (pairs[1] == rollout)).nonzero()[0]
        ids = table["sample_id"].take(pa.array(rows))
        theirs = pc.fill_null(pc.index_in(ids, value_set=source.sample_ids), -1).to_numpy()
        rows, theirs = rows[theirs >= 0], theirs[theirs >= 0]
        for name, values in source.sides[at].items():
            if has_column(table, name):
                held = found.setdefault(name, block.column(name).clone())
                _put(block, held, name, rows, values, source.offsets, theirs)
    return found


def _put(
    block: Block,
    held: Tensor,
    name: str,
    rows: np.ndarray[Any, Any],
    values: Tensor,
    offsets: Tensor,
    theirs: np.ndarray[Any, Any],
) -> None:
    if not block.per_token(name):
        held[torch.from_numpy(rows)] = values[torch.from_numpy(theirs)]
        return
    for row, other in zip(rows.tolist(), theirs.tolist(), strict=True):
        start, stop = int(block.packed.offsets[row]), int(block.packed.offsets[row + 1])
        first, last = int(offsets[other]), int(offsets[other + 1])
        if stop - start == last - first:  # else the handoff is what is wrong
            held[start:stop] = values[first:last]

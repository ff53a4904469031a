"""A trace in order: its records by kind, and those of each layer, rank and micro-batch together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from trajreplay.schema.bundles.r3.records import (
    BACKWARD,
    FORWARD,
    Action,
    Assignment,
    PayloadSample,
    Shard,
    TraceRecord,
    Verification,
)

# The name of a fetch's stage in the records of replay.
FETCH_STAGES = {"prev_lp": "prev-logprob", "train": "train"}


class Pass(NamedTuple):
    """One traced pass of a stage over a rank."""

    stage: str
    step: int
    rank: int


class Cell(NamedTuple):
    """One layer in a pass."""

    stage: str
    step: int
    rank: int
    layer: int

    @property
    def told(self) -> str:
        """It in words."""
        return f"rank {self.rank}, layer {self.layer}, {self.stage} at step {self.step}"

    @property
    def where(self) -> dict[str, object]:
        """Where a finding about it is."""
        return {
            "stage": self.stage,
            "trace_step": self.step,
            "rank": self.rank,
            "layer": self.layer,
        }


class Batch(NamedTuple):
    """One micro-batch of a traced stage."""

    stage: str
    step: int
    microbatch: int


@dataclass
class Replays:
    """What was recorded of one layer in a pass, in the order of the micro-batches."""

    assigned: list[Assignment] = field(default_factory=list)
    forward: list[Action] = field(default_factory=list)
    backward: list[Action] = field(default_factory=list)
    verified: list[Verification] = field(default_factory=list)
    verified_backward: list[Verification] = field(default_factory=list)


class Trace:
    """The records of one attempt, with those that no rule knows how to use left out.

    Args:
        records: In the order in which each process wrote them.
    """

    def __init__(self, records: Iterable[TraceRecord]) -> None:
        self.payloads: list[PayloadSample] = []
        self.shards: dict[Batch, dict[int, Shard]] = defaultdict(dict)
        self.replays: dict[Cell, Replays] = defaultdict(Replays)
        self.passes: set[Pass] = set()
        self.records = list(records)
        for record in self.records:
            self._take(record)

    def _take(self, record: TraceRecord) -> None:
        if isinstance(record, PayloadSample):
            self.payloads.append(record)
            return
        rank = record.origin.rank
        if rank is None:
            return  # replay outside of a job: rank.coverage says so
        self.passes.add(Pass(record.stage, record.trace_step, rank))
        if isinstance(record, Shard):
            batch = Batch(record.stage, record.trace_step, record.microbatch)
            self.shards[batch][rank] = record
        elif record.layer is not None:
            cell = self.replays[Cell(record.stage, record.trace_step, rank, record.layer)]
            if isinstance(record, Assignment):
                cell.assigned.append(record)
            elif isinstance(record, Action):
                {FORWARD: cell.forward, BACKWARD: cell.backward}[record.action].append(record)
            elif record.action == FORWARD:
                cell.verified.append(record)
            else:
                cell.verified_backward.append(record)

    @cached_property
    def producers(self) -> list[PayloadSample]:
        """Samples as they were put."""
        return [one for one in self.payloads if one.stage is None]

    @cached_property
    def fetches(self) -> list[PayloadSample]:
        """Samples as ranks fetched them."""
        return [one for one in self.payloads if one.stage is not None]

    @cached_property
    def world(self) -> tuple[int, ...]:
        """Every rank that the job has, by what its records say."""
        sizes = {one.origin.world_size for one in self.records} - {None}
        ranks = {one.origin.rank for one in self.records} - {None}
        known = {rank for rank in ranks if rank is not None}
        return tuple(sorted(known | set(range(max((one or 0 for one in sizes), default=0)))))

    @cached_property
    def steps(self) -> dict[str, list[int]]:
        """Traced steps by stage."""
        found: dict[str, set[int]] = defaultdict(set)
        for one in self.passes:
            found[one.stage].add(one.step)
        return {stage: sorted(steps) for stage, steps in sorted(found.items())}

    @cached_property
    def layers_of(self) -> dict[int, set[int]]:
        """Layers that each rank replays, over all stages."""
        found: dict[int, set[int]] = {rank: set() for rank in self.world}
        for cell, replays in self.replays.items():
            if replays.assigned:
                found.setdefault(cell.rank, set()).add(cell.layer)
        return found

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Every layer that is replayed somewhere."""
        return tuple(sorted(set().union(*self.layers_of.values())))

    @cached_property
    def experts(self) -> int:
        """Experts of a layer: the width of the router's scores; 0 where none are recorded."""
        widths = (
            one.scores_shape[-1]
            for replays in self.replays.values()
            for one in replays.verified
            if one.scores_shape
        )
        return max(widths, default=0)

    def shards_of(self, one: Pass) -> list[int]:
        """Micro-batches of a pass whose shard was recorded."""
        return self._recorded[one]

    @cached_property
    def _recorded(self) -> dict[Pass, list[int]]:
        found: dict[Pass, list[int]] = defaultdict(list)
        for batch, shards in sorted(self.shards.items()):
            for rank in shards:
                found[Pass(batch.stage, batch.step, rank)].append(batch.microbatch)
        return found

    def assigned_in(self, one: Pass) -> dict[int, int]:
        """How often a pass assigned each of its layers."""
        return self._assigned[one]

    def rows_of(self, one: Pass) -> dict[int, int]:
        """Rows that a pass replays of each micro-batch, by its number: most of any layer."""
        return self._rows[one]

    @cached_property
    def _rows(self) -> dict[Pass, dict[int, int]]:
        found: dict[Pass, dict[int, int]] = defaultdict(dict)
        for cell, replays in self.replays.items():
            rows = found[Pass(cell.stage, cell.step, cell.rank)]
            for number, one in enumerate(replays.assigned, 1):
                rows[number] = max(rows.get(number, 0), (one.routes.shape or (0,))[0])
        return found

    @cached_property
    def _assigned(self) -> dict[Pass, dict[int, int]]:
        found: dict[Pass, dict[int, int]] = defaultdict(dict)
        for cell, replays in self.replays.items():
            if replays.assigned:
                where = Pass(cell.stage, cell.step, cell.rank)
                found[where][cell.layer] = len(replays.assigned)
        return found

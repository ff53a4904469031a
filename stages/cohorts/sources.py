"""The rollouts that steps consumed from: their rows, found by sample id, kept while needed."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from trajreplay.query.files.reading import read_columns
from trajreplay.query.manifest.capture_sets import CaptureSets
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.columns import has_column
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import DATA, CaptureKey
from trajreplay.schema.tables import EVENTS, ROLLOUTS
from trajreplay.stages.cohorts.consumed import Consumed
from trajreplay.stages.cohorts.packed import numbered
from trajreplay.stages.cohorts.shard_outputs import Part
from trajreplay.stages.cohorts.shards import PLACED_BY, is_sharded, placed, whole_samples

# Columns that a rollout capture and the steps that consumed it both hold.
TWINS = (
    "group_id",
    "trajectory_id",
    "fragment_index",
    "agent_id",
    "episode_id",
    "turns",
    "truncated",
    "response_length",
    "total_length",
    "loss_mask",
    "message_faults",
    "tokens",
    "raw_reward",
    "reward_components",
    "greedy_reward",
    "kept_baseline",
    "reward",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
    "sum_pi_squared",
    "token_rewards",
    "kl",
    "advantages",
    "returns",
    "old_values",
    "last_value",
)
# What a step that lacks it reads of its rollouts; spans of weights are no values to compare.
FILLED = (*TWINS, "weight_versions")


@dataclass
class Source:
    """The rows of one rollout.

    Args:
        table: Its samples: `sample_id`, the twin columns that it holds, and the rank of each.
        recomputed: By column and sample, values that disagree with what the rollout recorded.
        ranks: The ranks that it was expected of.
    """

    table: pa.Table
    recomputed: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    def rows_of(self, sample_ids: pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(K,) int64. The row of each sample, -1 for one that the rollout does not hold."""
        found = pc.index_in(sample_ids, value_set=self.table["sample_id"].combine_chunks())
        return np.asarray(pc.fill_null(found, -1).to_numpy(), np.int64)


class Refused(str):
    """Why a rollout that is there cannot be used; of one that is not there it is a plain text."""

    __slots__ = ()


class Apart(str):
    """Why a rollout is not found that an attempt of the run which took no steps recorded."""

    __slots__ = ()


class Sources:
    """Rollouts by coordinates, the latest of them kept up to a number of bytes.

    Args:
        sets: The visible capture sets.
        limit_bytes: How much memory the kept rows may take.

    Attributes:
        consumed: What steps consumed from each rollout.
    """

    def __init__(self, sets: CaptureSets, limit_bytes: int) -> None:
        self._sets = sets
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._kept: OrderedDict[Cohort, Source | str] = OrderedDict()
        self._recomputed: dict[Cohort, dict[str, dict[str, Tensor]]] = {}
        self._with_events: dict[Cohort, list[CaptureKey]] | None = None
        self._by_run: dict[str, list[Cohort]] | None = None
        self.consumed = Consumed(sets)

    def find(self, run_id: str, attempt: int, rollout_id: int) -> Source | str:
        """The rows of a rollout, or why they cannot be had."""
        cohort = Cohort(run_id, attempt, rollout_id, None)
        found = self._kept.get(cohort)
        if found is None:
            found = self._kept[cohort] = self._read(cohort)
            self._bytes += _size(found)
            self._evict()
        self._kept.move_to_end(cohort)
        return found

    def events_of(self, cohort: Cohort) -> Iterator[pa.Table]:
        """The events of a cohort, those of each rank."""
        catalog = self._sets.catalog
        for key in self._events().get(cohort, ()):
            yield read_columns(
                catalog.store, catalog.entry(key), EVENTS, ["event", "sample_id", "reason"]
            )

    def _events(self) -> dict[Cohort, list[CaptureKey]]:
        """The captures of events by the rollout or step that they are of."""
        if self._with_events is None:
            found: dict[Cohort, list[CaptureKey]] = {}
            for key in self._sets.catalog.keys:
                if key.kind == "events" and key.rollout_id is not None and key.part == DATA:
                    place = Cohort(key.run_id, key.attempt, key.rollout_id, key.step_id)
                    found.setdefault(place, []).append(key)
            self._with_events = found
        return self._with_events

    def rollouts_before(self, cohort: Cohort) -> Iterator[Cohort]:
        """The rollouts of the run's lineage that came before one, the latest first."""
        mine = self._rollouts().get(cohort.run_id, [])
        place = cohort.attempt, cohort.rollout_id
        stop = bisect_left(mine, place, key=lambda one: (one.attempt, one.rollout_id))
        return (mine[at] for at in range(stop - 1, -1, -1))

    def _rollouts(self) -> dict[str, list[Cohort]]:
        """The rollouts of each run, in order."""
        if self._by_run is None:
            self._by_run = {}
            for one in self._sets:
                if one.step_id is None:
                    self._by_run.setdefault(one.run_id, []).append(one)
            for found in self._by_run.values():
                found.sort(key=lambda one: (one.attempt, one.rollout_id))
        return self._by_run

    def remember(self, cohort: Cohort, column: str, rows: dict[str, Tensor]) -> None:
        """Keep what a rollout's replay found in the place of recorded values, by sample id."""
        self._recomputed.setdefault(cohort, {})[column] = rows
        kept = self._kept.get(cohort)
        if isinstance(kept, Source):
            kept.recomputed[column] = rows

    def _read(self, cohort: Cohort) -> Source | str:
        if cohort not in self._sets:
            return self._elsewhere(cohort)
        found = self._sets[cohort]
        refusals = found.refusals()
        if refusals:
            return Refused(f"rollout {cohort.rollout_id} is refused: {refusals[0]}")
        there = {
            name
            for entry in found.owners
            if (file := entry.file("rollouts")) is not None
            for name in file.columns
        }
        held = [name for name in (*FILLED, *PLACED_BY) if name in there]
        names = ["sample_id", *dict.fromkeys(held)]
        store = self._sets.catalog.store
        try:
            parts = [
                Part(
                    replace(one, outputs=()),
                    numbered(read_columns(store, one, ROLLOUTS, names), one.key.rank),
                )
                for one in found.owners
            ]
            if is_sharded(parts):
                layout = found.owners[0].settings.layout
                parts = whole_samples([placed(part, layout) for part in parts], layout)
        except DatasetError as error:
            return Refused(f"rollout {cohort.rollout_id} is refused: {error.message}")
        tables = [part.table for part in parts]
        ranks = tuple(sorted(found.ranks))
        return Source(pa.concat_tables(tables), self._recomputed.get(cohort, {}), ranks)

    def _elsewhere(self, cohort: Cohort) -> str:
        """Why a rollout is not there, and which attempts of the run recorded one of its number."""
        run_id, mine, rollout_id = cohort[:3]
        catalog = self._sets.catalog
        others = [
            one
            for one in catalog.runs.get(run_id, ())
            if cohort._replace(attempt=one) in catalog.by_cohort
        ]
        if not others:
            return f"rollout {rollout_id} is not in the lake"
        if mine in others:
            return f"rollout {rollout_id} of attempt {mine} is superseded by a later attempt"
        there = ", ".join(map(str, others))
        told = f"rollout {rollout_id} is not in attempt {mine}, and is in attempt {there}"
        steps = (one for at in others for one in catalog.by_attempt[run_id, at])
        if any(one.kind == "step" for one in steps):
            return told  # another training of the same run
        return Apart(f"{told}, which took no steps: give driver and trainers the same attempt")

    def _evict(self) -> None:
        while self._bytes > self._limit_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)


class NoSources(Sources):
    """None at all, for captures whose sample ids are their own: no rollout is found by them."""

    def __init__(self) -> None:
        """There is nothing to keep."""
        self.consumed = Consumed(None)

    def find(self, run_id: str, attempt: int, rollout_id: int) -> str:
        """Why there is none."""
        return "the sample ids are those of an imported file"

    def events_of(self, cohort: Cohort) -> Iterator[pa.Table]:
        """None either."""
        return iter(())

    def rollouts_before(self, cohort: Cohort) -> Iterator[Cohort]:
        """None either."""
        return iter(())


def _size(one: Source | str) -> int:
    return one.table.nbytes if isinstance(one, Source) else 0


def fill_from_sources(
    table: pa.Table,
    nulls: Mapping[str, int],
    reads: frozenset[str],
    run_id: str,
    sources: Sources,
) -> pa.Table:
    """Add columns that the step's capture lacks from the rollouts that it consumed from.

    Args:
        table: The step's samples.
        nulls: How many of them lack each column that it has.
        reads: Columns that a stage reads.
        run_id: The run.
        sources: Its rollouts.
    """
    there, rows = nulls.keys(), table.num_rows
    lacking = [name for name in reads.intersection(FILLED) if nulls.get(name, rows) == rows]
    if not lacking or "source_rollout_id" not in there or not rows:
        return table
    for name in sorted(lacking):
        column = _from_sources(table, name, run_id, sources)
        if column is not None:
            if name in there:
                table = table.drop_columns([name])
            table = table.append_column(name, column)
    return table


def _from_sources(
    table: pa.Table, name: str, run_id: str, sources: Sources
) -> pa.ChunkedArray | None:
    coordinates = list(
        zip(
            table["source_attempt"].to_pylist(),
            table["source_rollout_id"].to_pylist(),
            strict=True,
        )
    )
    columns, order = [], []
    for attempt, rollout_id in sorted(set(coordinates)):
        source = sources.find(run_id, attempt, rollout_id)
        mine = np.array([at for at, one in enumerate(coordinates) if one == (attempt, rollout_id)])
        if isinstance(source, str) or not has_column(source.table, name):
            return None
        theirs = source.rows_of(table["sample_id"].take(pa.array(mine)))
        if (theirs < 0).any():
            return None
        columns.append(source.table[name].take(pa.array(theirs)).combine_chunks())
        order.append(mine)
    back = np.argsort(np.concatenate(order), kind="stable")
    joined = pa.chunked_array([chunk for one in columns for chunk in _chunks(one)])
    return joined.take(pa.array(back))


def _chunks(column: pa.Array | pa.ChunkedArray) -> list[pa.Array]:
    return list(column.chunks) if isinstance(column, pa.ChunkedArray) else [column]

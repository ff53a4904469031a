"""Whole cohorts with every column that they hold: for questions that go beyond a replay's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa

from trajreplay.query import Catalog, Cohort, Selected, source_rollouts
from trajreplay.query.files.reading import read_columns
from trajreplay.schema.errors import TrajReplayError
from trajreplay.schema.lists import Int64s
from trajreplay.schema.tables import SAMPLE_TABLES
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.earlier import Earlier, earlier_log_probs
from trajreplay.stages.cohorts.sources import Sources
from trajreplay.stages.cohorts.spans import Spans
from trajreplay.stages.replaying.judge import DEFAULT_MEMORY_BYTES
from trajreplay.stages.replaying.loading import Task, load_cohort
from trajreplay.stages.replaying.recipe import Recipes
from trajreplay.stages.report import CohortReport

_VERSIONS = "weight_versions"


class WholeCohorts:
    """Loads capture sets whole, one at a time.

    Args:
        catalog: The lake.
        selected: What is looked at; its rollouts are found among the same capture sets.
        stages: Stages wanted; all declared ones if empty.
        memory_bytes: What the samples of one may take in memory.
    """

    def __init__(
        self,
        catalog: Catalog,
        selected: Selected,
        stages: Sequence[str] = (),
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self._store = catalog.store
        self._sets = selected.sets
        self._selected = selected
        self._memory_bytes = memory_bytes
        self.sources = Sources(selected.sets, memory_bytes // 4)
        self._recipes = Recipes(stages, everything=True)

    def turns(self) -> Iterator[tuple[Cohort, bool]]:
        """Cohorts in the order in which they feed each other, and whether each was selected.

        Rollouts that selected steps consumed from are among them.
        """
        chosen = {one.captures.cohort for one in self._selected}
        behind = {
            source
            for cohort in chosen
            for source in source_rollouts(self._sets[cohort])
            if source in self._sets
        }
        tasks = [Task(self._sets[one]) for one in chain(chosen, behind - chosen)]
        for task in sorted(tasks, key=lambda one: (one.turn, one.captures.cohort.order)):
            yield task.captures.cohort, task.captures.cohort in chosen

    def sources_of(self, cohort: Cohort) -> list[Cohort]:
        """The rollouts that a step consumed from and that are there."""
        return [one for one in source_rollouts(self._sets[cohort]) if one in self._sets]

    def newest_weights(self, cohort: Cohort) -> int | None:
        """The newest weight version that sampled a cohort, or the rollouts that it is of.

        None where that was not captured, or cannot be read.
        """
        own = self._newest_of(cohort)
        theirs = self.sources_of(cohort) if own is None else []
        found = [own, *map(self._newest_of, theirs)]
        return max((one for one in found if one is not None), default=None)

    def _newest_of(self, cohort: Cohort) -> int | None:
        table = SAMPLE_TABLES["rollout" if cohort.step_id is None else "step"]
        held = [
            entry
            for entry in self._sets[cohort].owners
            if (file := entry.file(table.name)) and _VERSIONS in file.columns
        ]
        try:
            parts = [read_columns(self._store, one, table, [_VERSIONS]) for one in held]
        except TrajReplayError:
            return None  # a replay says so
        newest = (int(versions.max()) for one in parts if len(versions := _versions(one)))
        return max(newest, default=None)

    def earlier(self, cohort: LoadedCohort) -> Earlier:
        """The log-probs of the samples of a step as they were captured before it."""
        return earlier_log_probs(cohort, self._sets, self.sources)

    def declaring(self, cohort: Cohort, stage: str) -> list[Cohort]:
        """The cohort if it declares that a stage can be recomputed, else its rollouts that do."""
        found = []
        for one in (cohort, *source_rollouts(self._sets[cohort])):
            owners = self._sets[one].owners if one in self._sets else ()
            contract = owners[0].contracts.get(stage) if owners else None
            if contract is not None and contract.capability == "recompute":
                found.append(one)
                if one == cohort:
                    break
        return found

    def load(self, cohort: Cohort) -> LoadedCohort | CohortReport:
        """Read one; a report says why it is refused, or has nothing to recompute."""
        task = Task(self._sets[cohort])
        loaded = load_cohort(
            self._store, task, self.sources, self._recipes, memory_bytes=self._memory_bytes
        )
        if isinstance(loaded, LoadedCohort):
            loaded.drop_incomplete()
        return loaded


def _versions(part: pa.Table) -> Int64s:
    """(K,) The weights of the spans of some samples."""
    return Spans.of(part[_VERSIONS].drop_null()).version


def block_of(cohort: LoadedCohort) -> Block:
    """One cohort, packed."""
    return Block([cohort])

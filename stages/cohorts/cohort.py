"""A cohort under replay: one capture set, its samples in memory, and what is found about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.entry import Entry
from trajreplay.schema.identity import own_prefix
from trajreplay.schema.lists import Int64s
from trajreplay.schema.policy import Comparison, Tolerance, tolerance_of
from trajreplay.schema.settings import Settings
from trajreplay.stages.capability import Ability
from trajreplay.stages.cohorts.spans import UNKNOWN, Spans
from trajreplay.stages.report import CohortReport

# Read as text, and refused where a stage cannot do without.
_NULLABLE = ("group_id", "micro_batch_id")


@dataclass
class LoadedCohort:
    """One capture set under replay, its samples in memory.

    Args:
        report: What is found about it.
        settings: The arithmetic in force.
        owners: Entries of the captures that own its samples, by rank.
        table: The samples to replay: rows of the owners, in order of rank and row.
        rows: Samples that each owner holds in all, before a selection.
        abilities: Stages to recompute, and what each needs.
        whole: Whether `table` is the whole cohort.
        lacking: Columns that some sample lacks.
        finite: Columns without NaN and infinities, as the seals of the verified files count them.
        dtypes: dtype in which the producer held each recorded column.
        micro_batches: Samples that each (rank, micro-batch) holds in all.
        chained: Columns as their source rollouts recompute them, where they differ.
        linked: Whether source rollouts were there to take columns from.
        rescored: Whether the replay has a reward function.
        scores: (S,) float64. Raw rewards as that gives them.
        apart: Why handoffs are not compared though their rollout may be in the lake.
        unscored: Why a reward function does not verify the raw rewards.
        comparison: How the replay was asked to compare.
        incomplete: Its samples with what was left out of `table`; None where nothing was.
        others: By stage whose statistics are of whole rollouts, the samples of these that the step
            did not consume.
        earlier: (N,) float64. By column and time in words, log-probs of its samples that were
            captured before it.
    """

    report: CohortReport
    settings: Settings
    owners: list[Entry]
    table: pa.Table
    rows: dict[int, int]
    abilities: dict[str, Ability]
    whole: bool
    lacking: tuple[str, ...]
    finite: frozenset[str]
    dtypes: dict[str, str]
    micro_batches: dict[tuple[int, str | None], int] = field(default_factory=dict)
    chained: dict[str, Tensor] = field(default_factory=dict)
    linked: bool = False
    rescored: bool = False
    scores: Tensor | None = None
    apart: str = ""
    unscored: str = ""
    comparison: Comparison = field(default_factory=Comparison)
    incomplete: pa.Table | None = None
    others: Mapping[str, pa.Table] = field(default_factory=dict)
    earlier: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)

    @cached_property
    def stages(self) -> list[str]:
        """Stages to recompute, in order."""
        return [name for name in STAGE_NAMES if name in self.abilities]

    @property
    def own_ids(self) -> bool:
        """Whether its ids are of these captures alone, so that no rollout is found by them."""
        return has_own_ids(self.owners)

    @cached_property
    def micro_batch_names(self) -> np.ndarray[Any, Any]:
        """(S,) The micro-batch of each row of `table`."""
        return np.asarray(self.table["micro_batch_id"].to_pylist(), object)

    def drop_incomplete(self) -> None:
        """Leave out columns that some sample lacks: no stage reads them, and none can be packed."""
        some = [name for name in self.lacking if name not in _NULLABLE]
        if some:
            self.incomplete = self.table.select(["sample_id", "loss_mask", *some])
            self.table = self.table.drop_columns(some)
            self.chained = {name: one for name, one in self.chained.items() if name not in some}

    def versions(self, column: str) -> Int64s:
        """(S,) int64. The weights that a log-prob column of each sample is of, as its rank says.

        UNKNOWN where the rank does not say; one without samples has nothing to say.
        """
        return sample_versions(self.owners, self.table, column)

    @cached_property
    def spans(self) -> Spans:
        """Which weights sampled which tokens of its samples."""
        return Spans.of(self.table["weight_versions"])

    @property
    def plan(self) -> tuple[object, ...]:
        """Cohorts of equal plans can be packed together."""
        own = (one for entry in self.owners for one in entry.tolerances.items())
        claims = [self.owners[0].contracts[stage] for stage in self.stages]
        return (
            id(self.settings),  # captures of one run share it
            tuple((one.stage, one.version, one.implementation) for one in claims),
            self.scores is None,
            tuple(self.table.schema.names),
            tuple(sorted(self.dtypes.items())),
            frozenset(own),
        )

    def tolerance(self, stage: str, dtype: str = "float32") -> Tolerance:
        """The policy's tolerance, tightened by the captures' own, and as the replay was asked."""
        policy = tolerance_of(dtype)
        for entry in self.owners:
            if stage in entry.tolerances:
                policy = policy.tightened(entry.tolerances[stage])
        return self.comparison.of(policy)


def sample_versions(owners: Iterable[Entry], table: pa.Table, column: str) -> Int64s:
    """(S,) int64. The weights that a log-prob column of each sample is of, UNKNOWN where unsaid.

    Args:
        owners: The captures, which say so.
        table: The samples, with the rank of each.
        column: The column.
    """
    ranks = np.asarray(table["rank"].to_numpy(), np.int64)
    found = np.full(len(ranks), UNKNOWN, np.int64)
    for entry in owners:
        origin = entry.origins.get(column)
        if origin is not None and origin.weight_version is not None:
            found[ranks == entry.key.rank] = origin.weight_version
    return found


def has_own_ids(owners: Iterable[Entry]) -> bool:
    """Whether an import made the ids of captures that are local to their rank."""
    return any(own_prefix(one.producer, one.key.rank) for one in owners)

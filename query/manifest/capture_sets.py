"""Capture sets: the captures that together hold one cohort, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.query.manifest.completeness import completeness
from trajreplay.query.manifest.lineage import Lineage
from trajreplay.schema.digest import null_digest
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.tables import ROUTES, SAMPLE_TABLES

_KEPT_SETS = 1 << 12


@dataclass(frozen=True)
class CopyDifference:
    """A parallel copy that is not what its owner captured."""

    rank: int
    owner_rank: int
    columns: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(self.columns)
        return f"rank {self.rank} is a copy of rank {self.owner_rank} and differs in {names}"


@dataclass(frozen=True)
class CaptureSet:
    """The captures of one cohort.

    Args:
        cohort: Its coordinates.
        entries: Data entries by rank, owners and copies.
        expected_ranks: Ranks that the entries expect.
        gaps: What is missing from it; tolerated on request.
        problems: What is contradictory or damaged; never tolerated.
    """

    cohort: Cohort
    entries: tuple[Entry, ...]
    expected_ranks: tuple[int, ...]
    gaps: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def run_id(self) -> str:
        """Its run."""
        return self.cohort.run_id

    @property
    def attempt(self) -> int:
        """Its attempt."""
        return self.cohort.attempt

    @property
    def rollout_id(self) -> int:
        """Its rollout."""
        return self.cohort.rollout_id

    @property
    def step_id(self) -> int | None:
        """Its step, None at rollout level."""
        return self.cohort.step_id

    @property
    def kind(self) -> str:
        """Whether it was captured at rollout or step level, as a capture's kind."""
        return "rollout" if self.cohort.step_id is None else "step"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of which a data entry is there."""
        return tuple(entry.key.rank for entry in self.entries)

    @property
    def owners(self) -> tuple[Entry, ...]:
        """Entries whose samples count."""
        return tuple(entry for entry in self.entries if entry.owner)

    @property
    def copies(self) -> tuple[Entry, ...]:
        """Entries that repeat the samples of an owner."""
        return tuple(entry for entry in self.entries if not entry.owner)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing and nothing contradicts."""
        return not self.gaps and not self.problems

    def refusals(self, *, allow_partial: bool = False) -> tuple[str, ...]:
        """Why the set may not be used."""
        return self.problems if allow_partial else self.problems + self.gaps

    @cached_property
    def copy_differences(self) -> tuple[CopyDifference, ...]:
        """Copies whose columns do not have the digests of their owner's."""
        return tuple(
            CopyDifference(copy.key.rank, owner.key.rank, columns)
            for copy in self.copies
            if (owner := self.owner_of(copy)) is not None and (columns := _differing(copy, owner))
        )

    def owner_of(self, copy: Entry) -> Entry | None:
        """The owner that a copy repeats: of the same shard, and the same samples if several are."""
        shard = [one for one in self.owners if one.parallel.shard == copy.parallel.shard]
        same = [one for one in shard if "sample_id" not in _differing(copy, one)]
        return next(iter(same or shard), None)


class CaptureSets(Mapping[Cohort, CaptureSet]):
    """Capture sets by cohort in report order; the entries of one are read when it is asked for."""

    def __init__(self, catalog: Catalog, shown: Mapping[str, Lineage]) -> None:
        self.catalog = catalog
        self.lineages = shown
        self._read = lru_cache(maxsize=_KEPT_SETS)(self._read_set)

    @cached_property
    def _cohorts(self) -> tuple[Cohort, ...]:
        visible = (cohort for cohort in self.catalog.by_cohort if self._shows(cohort))
        return tuple(sorted(visible, key=lambda cohort: cohort.order))

    def _shows(self, cohort: Cohort) -> bool:
        lineage = self.lineages.get(cohort.run_id)
        return lineage is not None and lineage.shows(cohort)

    def __getitem__(self, cohort: Cohort) -> CaptureSet:
        if cohort not in self:
            raise KeyError(cohort)
        return self._read(cohort)

    def __contains__(self, cohort: object) -> bool:
        return cohort in self.catalog.by_cohort and self._shows(cohort)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Cohort]:
        return iter(self._cohorts)

    def __len__(self) -> int:
        return len(self._cohorts)

    def _read_set(self, cohort: Cohort) -> CaptureSet:
        overlap = self.lineages[cohort.run_id].overlaps.get(cohort)
        return read_capture_set(self.catalog, cohort, overlap or ())


def capture_sets(catalog: Catalog, shown: Mapping[str, Lineage]) -> CaptureSets:
    """The visible capture sets of these lineages."""
    return CaptureSets(catalog, shown)


def read_capture_set(catalog: Catalog, cohort: Cohort, overlap: tuple[int, ...] = ()) -> CaptureSet:
    """Read the entries of one cohort and say what is wrong with them.

    Args:
        catalog: The lake.
        cohort: Its coordinates.
        overlap: Attempts that hold the same coordinates without one continuing the other.
    """
    found = completeness(catalog, cohort, overlap)
    return CaptureSet(cohort, found.entries, found.expected_ranks, found.gaps, found.problems)


def _differing(copy: Entry, owner: Entry) -> tuple[str, ...]:
    found: list[str] = []
    # An earlier pipeline stage has no log-probs and none of what is made of them, and other layers.
    earlier = copy.parallel.pipeline_rank != owner.parallel.pipeline_rank
    for table in (SAMPLE_TABLES[copy.key.kind], ROUTES):
        mine, theirs = copy.file(table.name), owner.file(table.name)
        if table is ROUTES and (mine is None or theirs is None or earlier):
            continue  # routes are often recorded by the owner alone
        found += [
            column.name
            for column in table.columns
            if column.role != "key"
            and not (earlier and mine is not None and column.name not in mine.columns)
            and _digest(mine, column.name, column.type) != _digest(theirs, column.name, column.type)
        ]
    return tuple(found)


def _digest(file: DataFile | None, name: str, column_type: object) -> str:
    if file is None:
        return null_digest(column_type, 0)
    seal = file.columns.get(name)
    return null_digest(column_type, file.rows) if seal is None else seal.digest

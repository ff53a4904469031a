"""Capture sets: the captures that together hold one cohort, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trajreplay.query.catalog import Catalog, Cohort
from trajreplay.query.lineage import Lineage
from trajreplay.schema.digest import null_digest
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import DATA, CaptureKey
from trajreplay.schema.tables import SAMPLE_TABLES

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
    problems: list[str] = []
    if overlap:
        attempts = ", ".join(map(str, overlap))
        problems.append(
            f"attempts {attempts} all hold rollout {cohort.rollout_id}"
            f"{'' if cohort.step_id is None else f' step {cohort.step_id}'} and none is recorded "
            "as resumed from another; choose one: --attempt N"
        )
    entries: list[Entry] = []
    damaged: set[int] = set()
    keys = catalog.by_cohort[cohort]
    for key in keys:
        try:
            entry = catalog.entry(key)
        except DatasetError as error:
            problems.append(_one_line(error))
            damaged.add(key.rank)
            continue
        if key.part == DATA:
            entries.append(entry)
    expected = _expected(entries, problems)
    gaps = _missing(keys, expected, {entry.key.rank for entry in entries} | damaged)
    extra = [entry.key.rank for entry in entries if expected and entry.key.rank not in expected]
    if extra:
        problems.append(
            f"rank {_listed(extra)} is not among the expected ranks {_listed(expected)}: "
            "two jobs wrote under one run and attempt, or expected_ranks was wrong"
        )
    problems += _resume_problems(catalog, cohort, entries)
    problems += _copy_problems(entries)
    if not gaps and not damaged:
        gaps += _cohort_gaps(entries, problems)
    return CaptureSet(cohort, tuple(entries), expected, tuple(gaps), tuple(problems))


def _expected(entries: list[Entry], problems: list[str]) -> tuple[int, ...]:
    first = entries[0] if entries else None
    other = next((one for one in entries if one.expected_ranks != entries[0].expected_ranks), None)
    if first is not None and other is not None:
        problems.append(
            f"rank {first.key.rank} expects the ranks {_listed(first.expected_ranks)}, rank "
            f"{other.key.rank} expects {_listed(other.expected_ranks)}: the ranks of a capture "
            "set must agree; capture it again with the same expected_ranks everywhere"
        )
    return tuple(sorted({rank for entry in entries for rank in entry.expected_ranks}))


def _missing(keys: tuple[CaptureKey, ...], expected: tuple[int, ...], there: set[int]) -> list[str]:
    dropped = {key.rank for key in keys if key.part != DATA} - there
    missing = set(expected) - there - dropped
    gaps = []
    if missing:
        gaps.append(
            f"no capture of rank {_listed(sorted(missing))}, expected ranks {_listed(expected)}: "
            "capture again, or look at the rest with --allow-partial"
        )
    if dropped:
        gaps.append(
            f"rank {_listed(sorted(dropped))} dropped its capture: "
            "capture again, or look at the rest with --allow-partial"
        )
    return gaps


def _resume_problems(catalog: Catalog, cohort: Cohort, entries: list[Entry]) -> list[str]:
    recorded = catalog.resumed_from(cohort.run_id, cohort.attempt)
    return [
        f"{entry.key} says it was resumed from {entry.resumed_from}, its attempt says {recorded}: "
        "two jobs wrote under one attempt"
        for entry in entries
        if entry.resumed_from != recorded
    ]


def _copy_problems(entries: list[Entry]) -> list[str]:
    if all(entry.owner for entry in entries):
        return []
    shards = {entry.parallel.shard for entry in entries if entry.owner}
    return [
        f"rank {entry.key.rank} is a parallel copy and no rank of the set owns its samples"
        for entry in entries
        if not entry.owner and entry.parallel.shard not in shards
    ]


def _cohort_gaps(entries: list[Entry], problems: list[str]) -> list[str]:
    sizes = {entry.cohort_size for entry in entries} - {None}
    rows = sum(entry.rows for entry in entries if entry.owner)
    if len(sizes) > 1:
        problems.append(f"the ranks disagree on cohort_size: {_listed(sorted(map(str, sizes)))}")
        return []
    size = sizes.pop() if sizes else None
    if size is not None and size < rows:
        problems.append(f"cohort_size is {size} and {rows} samples were captured")
    if size is None or size <= rows:
        return []
    missing = f"{rows} samples were captured, expected cohort_size {size}"
    return [f"{missing}: capture all members, or look at the rest with --allow-partial"]


def _differing(copy: Entry, owner: Entry) -> tuple[str, ...]:
    table = SAMPLE_TABLES[copy.key.kind]
    mine, theirs = copy.file(table.name), owner.file(table.name)
    return tuple(
        column.name
        for column in table.columns
        if column.role != "key"
        and _digest(mine, column.name, column.type) != _digest(theirs, column.name, column.type)
    )


def _digest(file: DataFile | None, name: str, column_type: object) -> str:
    if file is None:
        return null_digest(column_type, 0)
    seal = file.columns.get(name)
    return null_digest(column_type, file.rows) if seal is None else seal.digest


def _one_line(error: DatasetError) -> str:
    return f"{error.message}. {error.hint}".strip() if error.hint else error.message


def _listed(items: object) -> str:
    return ", ".join(map(str, items))  # type: ignore[call-overload]

"""What is missing from a capture set, and what contradicts in it."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import DATA, CaptureKey


@dataclass(frozen=True)
class Completeness:
    """The data entries of a cohort, and what is wrong with them; see `CaptureSet`."""

    entries: tuple[Entry, ...]
    expected_ranks: tuple[int, ...]
    gaps: tuple[str, ...]
    problems: tuple[str, ...]


def completeness(catalog: Catalog, cohort: Cohort, overlap: tuple[int, ...]) -> Completeness:
    """Read the entries of one cohort and hold them against each other.

    Args:
        catalog: The lake.
        cohort: Its coordinates.
        overlap: Attempts that hold the same coordinates without one continuing the other.

    Raises:
        DatasetError: The attempt's record is damaged.
    """
    problems: list[str] = []
    if overlap:
        attempts = ", ".join(map(str, overlap))
        choices = " or ".join(f"--attempt {one}" for one in overlap)
        problems.append(
            f"attempts {attempts} all hold rollout {cohort.rollout_id}"
            f"{'' if cohort.step_id is None else f' step {cohort.step_id}'} and none is recorded "
            f"as resumed from another; choose one: {choices}"
        )
    entries: list[Entry] = []
    given_up: dict[int, Entry] = {}
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
        else:
            given_up[key.rank] = entry
    expected = _expected(entries, problems)
    gaps = _missing(keys, expected, {entry.key.rank for entry in entries} | damaged)
    gaps += _given_up_after(entries, given_up)
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
    return Completeness(tuple(entries), expected, tuple(gaps), tuple(problems))


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


def _given_up_after(entries: list[Entry], given_up: dict[int, Entry]) -> list[str]:
    """Data that something was to be added to, or to take the place of; nobody knows what it lacks.

    What was given up first and captured then is whole.
    """
    return [
        f"rank {one.key.rank} recorded the same again and gave it up: {later.reason}. What is here "
        "may be a part of it: capture again, or look at it with --allow-partial"
        for one in entries
        if (later := given_up.get(one.key.rank)) is not None and later.created_us >= one.created_us
    ]


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
        f"rank {entry.key.rank} is a parallel copy and no rank of the set owns its samples: "
        "capture tensor rank 0 of the last pipeline stage too, or say owner=True of one that counts"
        for entry in entries
        if not entry.owner and entry.parallel.shard not in shards
    ]


def _cohort_gaps(entries: list[Entry], problems: list[str]) -> list[str]:
    sizes = {entry.cohort_size for entry in entries} - {None}
    first = (entry for entry in entries if entry.owner and entry.parallel.context_rank == 0)
    rows = sum(entry.rows for entry in first)  # a context-parallel group holds each sample once
    if len(sizes) > 1:
        problems.append(f"the ranks disagree on cohort_size: {_listed(sorted(map(str, sizes)))}")
        return []
    size = sizes.pop() if sizes else None
    if any("context_size" in file.columns for entry in entries for file in entry.files):
        return []  # rows say which shard of their sample they are: counted once they are read
    if size is not None and size < rows:
        problems.append(f"cohort_size is {size} and {rows} samples were captured")
    if size is None or size <= rows:
        return []
    missing = f"{rows} samples were captured, expected cohort_size {size}"
    return [f"{missing}: capture all members, or look at the rest with --allow-partial"]


def _one_line(error: DatasetError) -> str:
    return f"{error.message}. {error.hint}".strip() if error.hint else error.message


def _listed(items: object) -> str:
    return ", ".join(map(str, items))  # type: ignore[call-overload]

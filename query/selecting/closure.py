"""What a recomputation cannot do without: whole groups, and the rollouts that samples are from."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from trajreplay.query.files.reading import read_columns
from trajreplay.query.manifest.capture_sets import CaptureSet, CaptureSets
from trajreplay.query.manifest.catalog import Cohort, cohort_of
from trajreplay.query.selecting.row_masks import Mask, SelectedSet, combined
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.store import Store
from trajreplay.schema.tables import SAMPLE_TABLES

_SOURCE = ("source_attempt", "source_rollout_id")
GroupKey = tuple[Any, ...]  # (group_id,), in a step preceded by source attempt and rollout


@dataclass(frozen=True)
class ShortGroup:
    """A group with members that were not captured.

    Args:
        group_id: The group.
        captured: Members that the capture set holds.
        size: Members that it had when it was normalised.
    """

    group_id: str
    captured: int
    size: int

    def __str__(self) -> str:
        return f"group {self.group_id!r}: {self.captured} of {self.size} members were captured"


@dataclass(frozen=True)
class Closure:
    """What to load of one capture set.

    Args:
        captures: The capture set.
        rows: By rank of an owner, which of its rows: a `pa.BooleanArray`, or None for all.
        whole: Whether that is the whole cohort.
        problems: Why the groups cannot be told.
    """

    captures: CaptureSet
    rows: dict[int, Mask]
    whole: bool
    problems: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[Cohort, ...]:
        """The rollouts that its samples come from, if it is a step."""
        return source_rollouts(self.captures)


def close(
    store: Store,
    selected: SelectedSet,
    closure: Literal["group", "cohort"] | None = None,
) -> Closure:
    """Widen selected rows to whole groups over all ranks, or to the whole cohort.

    A group is a `group_id`, in a step within the rollout that the sample is from.

    Args:
        store: The lake.
        selected: The rows.
        closure: `cohort` for all rows; groups otherwise.
    """
    captures = selected.captures
    if selected.whole or closure == "cohort":
        rows: dict[int, Mask] = {entry.key.rank: None for entry in captures.owners}
        return Closure(captures, rows, whole=True, problems=selected.problems)
    try:
        groups = {entry.key.rank: _groups(store, captures, entry) for entry in captures.owners}
    except DatasetError as error:
        return Closure(captures, selected.rows, whole=False, problems=(error.message,))
    problems = [*selected.problems]
    for rank, keys in groups.items():
        unknown = sum(key[-1] is None for key in keys)
        if unknown:
            problems.append(
                f"rank {rank}: {unknown} of {len(keys)} samples have no group_id, so that groups "
                "cannot be closed; select the whole cohort: --closure cohort"
            )
    wanted = _wanted(groups, selected.rows)
    widened = {
        rank: combined(None, pa.array([key in wanted for key in keys], pa.bool_()))
        for rank, keys in groups.items()
    }
    rows = {rank: mask for rank, mask in widened.items() if mask is None or mask.true_count}
    whole = all(mask is None for mask in widened.values())
    return Closure(captures, rows, whole=whole, problems=tuple(problems))


def _groups(store: Store, captures: CaptureSet, entry: Any) -> list[GroupKey]:
    table = SAMPLE_TABLES[captures.kind]
    names = [name for name in (*_SOURCE, "group_id") if name in table]
    columns = read_columns(store, entry, table, names)
    return list(zip(*(column.to_pylist() for column in columns.columns), strict=True))


def _wanted(groups: dict[int, list[GroupKey]], rows: dict[int, Mask]) -> set[GroupKey]:
    wanted: set[GroupKey] = set()
    for rank, keys in groups.items():
        if rank in rows:
            mask = rows[rank]
            chosen = (
                keys
                if mask is None
                else [key for key, one in zip(keys, mask, strict=True) if one.as_py()]
            )
            wanted.update(chosen)
    return wanted


def short_groups(groups: Iterable[GroupKey], sizes: Iterable[int | None]) -> tuple[ShortGroup, ...]:
    """Groups that are known to have had more members than these.

    Args:
        groups: The group of each sample.
        sizes: Its `group_size`, None where it is not known.
    """
    captured: dict[GroupKey, int] = {}
    known: dict[GroupKey, int] = {}
    for key, size in zip(groups, sizes, strict=True):
        captured[key] = captured.get(key, 0) + 1
        if size is not None:
            known[key] = max(size, known.get(key, 0))
    return tuple(
        ShortGroup(str(key[-1]), captured[key], size)
        for key, size in known.items()
        if size > captured[key] and key[-1] is not None
    )


def source_rollouts(captures: CaptureSet) -> tuple[Cohort, ...]:
    """The rollouts that a step consumed from, as its entries list them; none of a rollout."""
    found = {source for entry in captures.entries for source in entry.sources}
    return tuple(Cohort(captures.run_id, *source, None) for source in sorted(found))


def also_consumed_by(sets: CaptureSets, selected: Collection[Cohort]) -> dict[Cohort, list[Cohort]]:
    """Steps that consumed samples of selected rollouts and were not selected themselves.

    Read from manifest entries alone: those of all steps, once per catalog.

    Args:
        sets: The visible capture sets.
        selected: Cohorts; those of them that are rollouts are looked for.

    Returns:
        By rollout, its other consumers in report order.
    """
    chosen = set(selected)
    found: dict[Cohort, list[Cohort]] = {}
    for rollout in selected:
        if rollout.step_id is None:
            keys = sets.catalog.consumers.get(rollout, ())
            others = {one for key in keys if (one := cohort_of(key)) in sets} - chosen
            if others:
                found[rollout] = sorted(others, key=lambda cohort: cohort.order)
    return found

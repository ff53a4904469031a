"""Which rows of a capture set a selection takes, by ids, ranks and matches of a predicate."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.files.reading import read_columns
from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.query.selecting.predicates import Matches
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import own_prefix
from trajreplay.schema.store import Store
from trajreplay.schema.tables import SAMPLE_TABLES

Mask = Any  # a pa.BooleanArray with one value a row, or None for all rows
_COLUMNS = {"samples": "sample_id", "groups": "group_id", "batches": "micro_batch_id"}
_OPTIONS = {"samples": "--sample", "groups": "--group", "batches": "--batch"}


@dataclass(frozen=True)
class SelectedSet:
    """The selected rows of one capture set.

    Args:
        captures: The capture set.
        rows: By rank of an owner, which of its rows: a `pa.BooleanArray`, or None for all. Ranks
            of which nothing is selected are left out.
        problems: Why the rows could not be told.
    """

    captures: CaptureSet
    rows: dict[int, Mask]
    problems: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all captured samples are selected."""
        owners = (entry for entry in self.captures.owners if entry.rows)
        return all(self.rows.get(entry.key.rank, False) is None for entry in owners)

    @property
    def count(self) -> int:
        """Selected samples."""
        found = 0
        for entry in self.captures.owners:
            if entry.key.rank in self.rows:
                mask = self.rows[entry.key.rank]
                found += entry.rows if mask is None else mask.true_count
        return found


@dataclass(frozen=True)
class Named:
    """Ids that a selection names; kinds left empty restrict nothing."""

    samples: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    batches: tuple[str, ...] = ()

    @property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """The kinds that restrict something, with their ids."""
        return {one.name: ids for one in fields(self) if (ids := getattr(self, one.name))}


def all_rows(captures: CaptureSet) -> SelectedSet:
    """A capture set with all its rows."""
    return SelectedSet(captures, {entry.key.rank: None for entry in captures.owners})


class RowFinder:
    """Finds the selected rows of capture sets, and remembers which names were seen.

    Args:
        store: The lake.
        named: Ids to look for.
        ranks: Ranks to take rows of; all if empty.
        matches: Rows that a predicate matched; None without one.
    """

    def __init__(
        self, store: Store, named: Named, ranks: tuple[int, ...], matches: Matches | None
    ) -> None:
        self._store = store
        self._named = named.kinds
        self._ranks = ranks
        self._matches = matches
        self._unseen: dict[str, set[str]] = {kind: set(ids) for kind, ids in self._named.items()}
        self._unseen_ranks = set(ranks)
        self._unreadable = False

    def rows_of(self, captures: CaptureSet, unreadable: str | None = None) -> SelectedSet:
        """The selected rows of one capture set.

        Args:
            captures: The capture set.
            unreadable: Why the predicate could not be evaluated on some of its captures.
        """
        problems = [] if unreadable is None else [unreadable]
        found = None if self._matches is None else self._matches.get(captures.cohort, {})
        wanted = self._owner_ranks(captures)
        rows: dict[int, Mask] = {}
        for entry in captures.owners:
            rank = entry.key.rank
            if rank not in wanted or (found is not None and rank not in found):
                continue
            try:
                mask = self._by_ids(captures, entry)
            except DatasetError as error:
                problems.append(error.message)
                continue
            mask = combined(mask, None if found is None else _mask_of(entry.rows, found[rank]))
            if mask is None or mask.true_count:
                rows[rank] = mask
        self._unreadable |= bool(problems)
        return SelectedSet(captures, rows, tuple(problems))

    @property
    def absent(self) -> str:
        """The first name that no capture holds; none can be told if a file could not be read."""
        if self._unreadable:
            return ""
        unseen = [
            f"{_OPTIONS[kind]} {shlex.quote(name)}"
            for kind, names in self._unseen.items()
            for name in sorted(names)
        ]
        unseen += [f"--rank {rank}" for rank in sorted(self._unseen_ranks)]
        return next(iter(unseen), "")

    def _owner_ranks(self, captures: CaptureSet) -> set[int]:
        """Ranks whose rows are taken; a copy's are its owner's."""
        owners = {entry.key.rank for entry in captures.owners}
        if not self._ranks:
            return owners
        self._unseen_ranks -= set(captures.ranks)
        named = set(self._ranks)
        for copy in captures.copies:
            if copy.key.rank in named and (owner := captures.owner_of(copy)) is not None:
                named.add(owner.key.rank)
        return owners & named

    def _by_ids(self, captures: CaptureSet, entry: Entry) -> Mask:
        if not self._named:
            return None
        table = SAMPLE_TABLES[captures.kind]
        columns = [_COLUMNS[kind] for kind in self._named]
        values = read_columns(self._store, entry, table, columns)
        prefix = own_prefix(entry.producer, entry.key.rank)
        mask: Mask = None
        for kind, ids in self._named.items():
            column = values.column(_COLUMNS[kind]).combine_chunks()
            there = set(pc.unique(column).to_pylist())
            self._unseen[kind] -= there
            if prefix:  # ids as the files of this rank have them name its samples too
                self._unseen[kind] -= {str(one).removeprefix(prefix) for one in there}
            wanted = [*ids, *(prefix + one for one in ids if prefix)]
            mask = combined(mask, pc.is_in(column, value_set=pa.array(wanted, pa.string())))
        return mask


def combined(left: Mask, right: Mask) -> Mask:
    """Rows that are in both; None where that is all of them."""
    if left is None or right is None:
        mask = right if left is None else left
    else:
        mask = pc.and_(left, right)
    return None if mask is None or mask.true_count == len(mask) else mask


def _mask_of(rows: int, matching: pa.Array) -> Mask:
    return pc.is_in(pa.array(range(rows), pa.int32()), value_set=matching)


def rows_named(store: Store, captures: CaptureSet, samples: tuple[str, ...]) -> SelectedSet:
    """The rows of a capture set that hold these samples; a name that it lacks selects nothing."""
    return RowFinder(store, Named(samples=samples), (), None).rows_of(captures)

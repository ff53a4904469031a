"""The manifest as one reader sees it: which captures there are, their entries, and the attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from trajreplay.query.manifest.snapshots import Snapshot
from trajreplay.schema.attempt import AttemptRecord, load_attempt
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.claim import CLAIM_SUFFIX
from trajreplay.schema.entry import Entry
from trajreplay.schema.entry_codec import load_entry
from trajreplay.schema.errors import DatasetError, QueryError, did_you_mean
from trajreplay.schema.identity import DATA, CaptureKey, ResumePoint
from trajreplay.schema.layout import (
    ATTEMPTS,
    ENTRIES,
    attempt_path,
    entry_path,
    key_of_entry,
    run_of_attempt,
)
from trajreplay.schema.store import Store
from trajreplay.schema.tables import MANIFEST

_KEY_SCHEMA = pa.schema([MANIFEST[name].field for name in CaptureKey._fields])
_KEPT_ENTRIES = 1 << 14


class Cohort(NamedTuple):
    """Coordinates of one capture set; `step_id` is None at rollout level."""

    run_id: str
    attempt: int
    rollout_id: int
    step_id: int | None

    def __str__(self) -> str:
        step = "" if self.step_id is None else f" step {self.step_id}"
        attempt = f" attempt {self.attempt}" if self.attempt else ""
        return f"run {self.run_id!r}{attempt} rollout {self.rollout_id}{step}"

    @property
    def order(self) -> tuple[str, int, int, int]:
        """Where it stands in reports: by run, rollout, step (the rollout itself first), attempt."""
        step = -1 if self.step_id is None else self.step_id
        return self.run_id, self.rollout_id, step, self.attempt


@dataclass(frozen=True)
class Catalog:
    """One listing of the manifest; entries are parsed when asked for, and the latest kept.

    Everything read through one catalog sees the same commits.
    """

    store: Store
    snapshot: Snapshot
    keys: tuple[CaptureKey, ...]
    attempt_names: tuple[tuple[str, int], ...] = ()
    problems: tuple[DatasetError, ...] = ()
    _records: dict[tuple[str, int], AttemptRecord] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, store: Store, *, strict: bool = True, snapshots: bool = True) -> Catalog:
        """List the manifest once.

        Args:
            store: The lake.
            strict: Whether to raise the first problem of the listing rather than keep it.
            snapshots: Whether entries are taken from the newest snapshot, where it holds them,
                rather than each from its own file.

        Raises:
            DatasetError: A file in the manifest is misnamed, a link or a special file.
        """
        problems: list[DatasetError] = []
        paths = _names(store, ENTRIES, problems)
        keys = sorted(_parsed(paths, key_of_entry, problems), key=_order)
        attempts = sorted(_parsed(_names(store, ATTEMPTS, problems), run_of_attempt, problems))
        if strict and problems:
            raise problems[0]
        # Read after the listing: what was listed is in this snapshot, or a file of its own.
        snapshot = Snapshot.newest(store) if snapshots else Snapshot(store)
        return cls(store, snapshot, tuple(keys), tuple(attempts), tuple(problems))

    def entry(self, key: CaptureKey) -> Entry:
        """The entry of a key, its bytes verified.

        Raises:
            DatasetError: It is missing or damaged.
        """
        return self._load(key)

    def entry_bytes(self, key: CaptureKey) -> bytes:
        """The bytes of the entry of a key, not verified.

        Raises:
            DatasetError: They cannot be read.
        """
        found = self.snapshot.find(key)
        return self.store.read(entry_path(key), MAX_BYTES) if found is None else found

    @cached_property
    def _load(self) -> Callable[[CaptureKey], Entry]:
        def load(key: CaptureKey) -> Entry:
            return load_entry(self.entry_bytes(key), entry_path(key))

        return lru_cache(maxsize=_KEPT_ENTRIES)(load)

    def attempt_record(self, run_id: str, attempt: int) -> AttemptRecord | None:
        """What was recorded when an attempt started, None without a record.

        Raises:
            DatasetError: The record is damaged.
        """
        if (run_id, attempt) not in self._named_attempts:
            return None
        found = self._records.get((run_id, attempt))
        if found is None:
            path = attempt_path(run_id, attempt)
            found = load_attempt(self.store.read(path, MAX_BYTES), path)
            self._records[run_id, attempt] = found
        return found

    def resumed_from(self, run_id: str, attempt: int) -> ResumePoint | None:
        """What an attempt continues: as its record says, else as its first capture does.

        Raises:
            DatasetError: The record or that capture's entry is damaged.
        """
        record = self.attempt_record(run_id, attempt)
        if record is not None:
            return record.resumed_from
        keys = self.by_attempt.get((run_id, attempt), ())
        return self.entry(keys[0]).resumed_from if keys else None

    @cached_property
    def _named_attempts(self) -> frozenset[tuple[str, int]]:
        return frozenset(self.attempt_names)

    @cached_property
    def key_table(self) -> pa.Table:
        """All keys as a table, in the order of `keys`, with their place as `index`."""
        parts: list[Any] = list(zip(*self.keys, strict=True)) or [()] * len(_KEY_SCHEMA)
        arrays = [
            pa.array(part, field.type) for part, field in zip(parts, _KEY_SCHEMA, strict=True)
        ]
        table = pa.Table.from_arrays(arrays, schema=_KEY_SCHEMA)
        return table.append_column("index", pa.array(range(len(self.keys)), pa.int64()))

    @cached_property
    def by_attempt(self) -> Mapping[tuple[str, int], tuple[CaptureKey, ...]]:
        """Keys of each attempt of each run."""
        return _grouped(self.keys, lambda key: (key.run_id, key.attempt))

    @cached_property
    def by_cohort(self) -> Mapping[Cohort, tuple[CaptureKey, ...]]:
        """Keys of each capture set, ranks and dropped parts in order; events are no cohort."""
        samples = (key for key in self.keys if key.kind != "events")
        return _grouped(samples, cohort_of)

    @cached_property
    def by_rollout(self) -> Mapping[tuple[str, int, int], tuple[Cohort, ...]]:
        """Capture sets of each rollout: its own and those of its steps."""
        return _grouped(self.by_cohort, lambda cohort: cohort[:3])

    @cached_property
    def consumers(self) -> Mapping[Cohort, tuple[CaptureKey, ...]]:
        """Keys of the step captures that consumed samples of each rollout, by their entries.

        Every step's entry is read for it; damaged ones are left out.
        """
        found: list[tuple[Cohort, CaptureKey]] = []
        for key in self.keys:
            if key.kind == "step" and key.part == DATA:
                with suppress(DatasetError):
                    found += [
                        (Cohort(key.run_id, *source, None), key)
                        for source in self.entry(key).sources
                    ]
        grouped = _grouped(found, lambda pair: pair[0])
        return {rollout: tuple(key for _, key in pairs) for rollout, pairs in grouped.items()}

    @cached_property
    def runs(self) -> Mapping[str, tuple[int, ...]]:
        """Attempts of each run, those that captured nothing yet included."""
        found: dict[str, set[int]] = {}
        for run_id, attempt in (*self.by_attempt, *self.attempt_names):
            found.setdefault(run_id, set()).add(attempt)
        return {run_id: tuple(sorted(found[run_id])) for run_id in sorted(found)}

    def check_run(self, run_id: str) -> str:
        """Return a run's id.

        Raises:
            QueryError: The lake has no such run.
        """
        if run_id not in self.runs:
            there = ", ".join(map(repr, self.runs)) or "none"
            near = did_you_mean(run_id, self.runs)
            raise QueryError(
                f"no run {run_id!r} in {self.store}, expected one of: {there}{near}",
                hint="To list the runs: trajreplay info",
                run_id=run_id,
            )
        return run_id

    def check_attempts(self, run_id: str, attempts: Iterable[int]) -> None:
        """Refuse attempts that a run does not have.

        Raises:
            QueryError: The lake has no such run, or the run no such attempt.
        """
        there = self.runs[self.check_run(run_id)]
        absent = [one for one in attempts if one not in there]
        if absent:
            raise QueryError(
                f"run {run_id!r} has no attempt {', '.join(map(str, absent))}, expected some of "
                f"{', '.join(map(str, there))}",
                hint="To list the attempts of each run: trajreplay info",
                run_id=run_id,
            )

    def only_run(self) -> str:
        """The run of a lake that has one.

        Raises:
            QueryError: It has several, or none.
        """
        if len(self.runs) != 1:
            there = ", ".join(map(repr, self.runs)) or "none"
            raise QueryError(
                f"{self.store} has {len(self.runs)} runs, expected that one is named: {there}",
                hint="To list the runs: trajreplay info",
            )
        return next(iter(self.runs))


def cohort_of(key: CaptureKey) -> Cohort:
    """The capture set that a rollout or step capture belongs to."""
    if key.rollout_id is None:
        raise AssertionError(f"{key} has no rollout")
    return Cohort(key.run_id, key.attempt, key.rollout_id, key.step_id)


def _names(store: Store, folder: str, problems: list[DatasetError]) -> list[str]:
    found: list[str] = []
    try:
        found.extend(one.path for one in store.list(folder) if not one.path.endswith(CLAIM_SUFFIX))
    except DatasetError as error:
        problems.append(error)
    return found


def _parsed(paths: Iterable[str], parse: Any, problems: list[DatasetError]) -> list[Any]:
    found = []
    for path in paths:
        try:
            found.append(parse(path))
        except DatasetError as error:
            problems.append(error)
    return found


def _order(key: CaptureKey) -> tuple[Any, ...]:
    return tuple(-1 if part is None else part for part in key)


def _grouped(items: Iterable[Any], name: Any) -> dict[Any, tuple[Any, ...]]:
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(name(item), []).append(item)
    return {key: tuple(values) for key, values in found.items()}

"""Captures of a spool brought into the lake: several in one data file, each with its own entry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.digest import column_digest
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.entry_codec import dump_entry, load_entry, same_content
from trajreplay.schema.errors import CaptureError, DatasetError, TrajReplayError
from trajreplay.schema.identity import DATA, DROPPED
from trajreplay.schema.layout import ENTRIES, entry_path, packed_path
from trajreplay.schema.publish import remove_if_there
from trajreplay.schema.store import Store
from trajreplay.schema.tables import TABLES
from trajreplay.writer.commit import commit_entry
from trajreplay.writer.copying import (
    captured_rows,
    copy_attempt,
    copy_events_beside,
    verified_bytes,
)
from trajreplay.writer.parquet import write_table

PACK_CAPTURES = 32  # in one data file: each of its readers parses a footer of all of them
PACK_BYTES = 32 << 20  # of one data file, unless a single capture has more


@dataclass
class Promoted:
    """What became of the captures of a spool.

    Attributes:
        captures: Captures that are in the lake now and were not there before.
        known: Captures that the lake held already, with the same content.
        files: Data files that were written.
        problems: What stays in the spool, and why.
    """

    captures: int = 0
    known: int = 0
    files: int = 0
    problems: list[TrajReplayError] = field(default_factory=list)


class TakenError(CaptureError):
    """The lake has another capture of the same key.

    Args:
        path: That of its entry.
        entry: What is in the spool.
    """

    def __init__(self, path: str, entry: Entry) -> None:
        super().__init__(
            f"{path}: {entry.key} is committed with other content than it has in the spool",
            hint="Two trainings wrote the same attempt of one run: give each its own, and look at "
            "both with trajreplay inspect.",
            path=path,
            key=entry.key,
        )
        self.entry = entry


def spooled(spool: Store) -> list[str]:
    """Paths of the entries of what waits in a spool."""
    return sorted(one.path for one in spool.list(ENTRIES))


def promote_captures(
    spool: Store, lake: Store, *, stop: Callable[[], bool] = lambda: False
) -> Promoted:
    """Bring what was committed to a spool into the lake, oldest first, and empty the spool.

    A capture leaves the spool once the lake has its entry, so that it is in one of the two
    whenever a process or a machine dies; done again, it is a retry.

    Args:
        spool: A lake in a folder of this machine.
        lake: Where its captures belong.
        stop: Asked between two files; whether to leave the rest for later.

    Returns:
        What was done. A capture that cannot be brought there stays, and does not hold up others.

    Raises:
        OSError: The lake or the spool cannot be written or read.
    """
    found = Promoted()
    waiting = list(_waiting(spool, lake, found))
    for batch in _batches(sorted(waiting, key=lambda one: one.created_us)):
        if stop():
            break
        try:
            _promote(spool, lake, batch, found)
        except TrajReplayError:
            for one in batch:  # what is wrong with one of them is no fault of the others
                _promote_alone(spool, lake, one, found)
    return found


def _promote_alone(spool: Store, lake: Store, entry: Entry, found: Promoted) -> None:
    try:
        if _is_known(lake, entry):
            _forget(spool, entry)
        else:
            _promote(spool, lake, [entry], found)
    except TakenError as error:
        _settle(spool, lake, error, found)
    except TrajReplayError as error:
        found.problems.append(error)


def _waiting(spool: Store, lake: Store, found: Promoted) -> Iterator[Entry]:
    """Entries of a spool that the lake lacks; what it has leaves the spool."""
    for path in spooled(spool):
        try:
            entry = load_entry(spool.read(path, MAX_BYTES), path)
            if _is_known(lake, entry):
                found.known += 1
                _forget(spool, entry)
            else:
                yield entry
        except TakenError as error:
            _settle(spool, lake, error, found)
        except TrajReplayError as error:
            found.problems.append(error)


def _settle(spool: Store, lake: Store, taken: TakenError, found: Promoted) -> None:
    """Bring events under the next free step, as their writer would; of others, note it there."""
    entry = taken.entry
    key = entry.key
    if key.kind != "events" or key.step_id is None or key.part != DATA:
        found.problems.append(taken)
        _note(lake, taken)
        return
    try:
        if copy_events_beside(spool, lake, entry):
            found.captures += 1
            found.files += len(entry.files)
        else:
            found.known += 1
        _forget(spool, entry)
    except TrajReplayError as error:
        found.problems.append(error)


def _note(lake: Store, taken: TakenError) -> None:
    """Say in the lake that there was more of a capture than it has, as its writers do."""
    entry = taken.entry
    if entry.key.kind == "events" or entry.key.part != DATA:
        return
    key = entry.key._replace(part=DROPPED)
    given_up = replace(
        entry, key=key, status="dropped", reason=taken.message, files=(), outputs=(), tokens=0
    )
    if not lake.exists(entry_path(key)):
        commit_entry(lake, given_up)


def _is_known(lake: Store, entry: Entry) -> bool:
    """Whether the lake holds a capture.

    Raises:
        CaptureError: It holds another one of the same key.
        DatasetError: Its entry is damaged.
    """
    path = entry_path(entry.key)
    if not lake.exists(path):
        return False
    if same_content(load_entry(lake.read(path, MAX_BYTES), path), entry):
        return True
    raise TakenError(path, entry)


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Captures in pieces that make files of bounded size."""
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        mine = sum(one.bytes for one in entry.files)
        if batch and (len(batch) == PACK_CAPTURES or size + mine > PACK_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += mine
    if batch:
        yield batch


def _promote(spool: Store, lake: Store, batch: list[Entry], found: Promoted) -> None:
    """Write the files of some captures, then their entries; only then they leave the spool."""
    alike: dict[object, list[tuple[Entry, DataFile]]] = {}
    for entry in batch:
        copy_attempt(spool, lake, entry)
        for file in entry.files:
            kind = entry.key.run_id, entry.key.attempt, file.table, *sorted(file.columns)
            alike.setdefault(kind, []).append((entry, file))
    placed: dict[str, DataFile] = {}  # by where it was in the spool
    written: list[str] = []
    try:
        for members in alike.values():
            packed = _pack(spool, lake, members)
            written.append(packed[0].path)
            placed |= {old.path: new for (_, old), new in zip(members, packed, strict=True)}
    except BaseException:
        for path in written:
            lake.remove(path)
        raise
    found.files += len(written)
    for entry in batch:
        moved = replace(entry, files=tuple(placed[one.path] for one in entry.files))
        if lake.publish_if_absent(entry_path(entry.key), dump_entry(moved)):
            found.captures += 1
        elif _is_known(lake, entry):
            found.known += 1
        _forget(spool, entry)


def _pack(spool: Store, lake: Store, members: list[tuple[Entry, DataFile]]) -> list[DataFile]:
    """Write one file with the rows of several captures; returns where those of each are."""
    key, table = members[0][0].key, TABLES[members[0][1].table]
    rows: list[pa.Table] = []
    sizes: list[int] = []
    firsts: list[int] = []
    for _, file in members:
        rows.append(_unchanged(file, captured_rows(file, verified_bytes(spool, file))))
        firsts.append(len(sizes))
        sizes += file.row_groups
    path, temporary = packed_path(key.run_id, key.attempt, table.name), lake.temporary()
    try:
        size, footer, digest = write_table(temporary, table, pa.concat_tables(rows), sizes)
        lake.place(temporary, path)
    finally:
        remove_if_there(temporary)
    return [
        replace(file, path=path, bytes=size, footer=footer, digest=digest, first_row_group=first)
        for (_, file), first in zip(members, firsts, strict=True)
    ]


def _unchanged(file: DataFile, rows: pa.Table) -> pa.Table:
    """Rows whose values are those that were captured, and which fill their row groups."""
    if sum(file.row_groups) != file.rows:
        raise DatasetError(
            f"{file.path} has rows of other captures in the same row groups, expected a file of a "
            "spool",
            hint="Only what a training spooled is brought into a lake: trajreplay promote FOLDER",
            path=file.path,
        )
    for name in rows.column_names:
        if column_digest(rows[name]) != file.columns[name].digest:
            raise DatasetError(
                f"{file.path} column {name} has other values than those that were captured",
                hint="The disk of the spool is at fault: look at it, and at its other captures.",
                path=file.path,
                column=name,
            )
    return rows


def _forget(spool: Store, entry: Entry) -> None:
    """Remove a capture that the lake has: its entry last, by which a retry finds the rest."""
    for file in entry.files:
        spool.remove(file.path)
    spool.remove(entry_path(entry.key))

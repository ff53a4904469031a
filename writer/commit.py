"""The commit protocol: a data file written aside, then one entry that is created only if absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.columns import Table
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.entry_codec import dump_entry, load_entry, same_content
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.layout import data_path, entry_path
from trajreplay.schema.publish import remove_if_there
from trajreplay.schema.store import Store, now_us
from trajreplay.schema.tables import TABLES
from trajreplay.writer.encode import ListColumn
from trajreplay.writer.parquet import build_table, seal_columns, write_table

SWEEP_AFTER_S = 24 * 3600.0
_swept: set[str] = set()


@dataclass(frozen=True)
class TableRows:
    """Rows of a capture that belong to one table.

    Args:
        table: The table.
        columns: The columns, without those that are all null.
        rows: Rows of every column.
        source_dtypes: dtype of each column as the producer held it.
    """

    table: Table
    columns: Mapping[str, pa.Array | ListColumn]
    rows: int
    source_dtypes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A capture whose content is known and checked, and of which nothing is written yet.

    Args:
        entry: Its entry; where its files will be is open.
        tables: The rows of each of its files.
    """

    entry: Entry
    tables: tuple[pa.Table, ...] = ()

    @property
    def value_bytes(self) -> int:
        """About what its rows take in memory."""
        return sum(map(value_bytes, self.entry.files))


def value_bytes(file: DataFile) -> int:
    """About what the values in a data file take in memory."""
    table = TABLES[file.table]
    return sum(seal.values * table[name].value_bytes for name, seal in file.columns.items())


def prepare_rows(entry: Entry, *tables: TableRows) -> Prepared:
    """Lay the rows of a capture out, and digest them.

    Args:
        entry: Everything of the entry but its files.
        tables: Its rows, a file each.
    """
    laid = [build_table(one.table, one.columns, one.rows) for one in tables]
    drafts = tuple(
        DataFile(
            table=one.table.name,
            path="",
            bytes=0,
            footer="",
            digest="",
            first_row_group=0,
            row_groups=row_groups,
            first_row=0,
            rows=one.rows,
            columns=seal_columns(data, one.source_dtypes, one.columns),
        )
        for one, (data, row_groups) in zip(tables, laid, strict=True)
    )
    return Prepared(replace(entry, files=drafts), tuple(data for data, _ in laid))


def commit_rows(store: Store, prepared: Prepared) -> Entry:
    """Commit a capture.

    Args:
        store: The lake.
        prepared: The capture.

    Returns:
        The entry in the lake: this one, or an equal one that was there.

    Raises:
        CaptureError: The key is taken by other content, or the entry is too large.
    """
    entry = prepared.entry
    if not entry.files:
        return commit_entry(store, entry)
    if (existing := existing_entry(store, entry)) is not None:
        return existing
    written: list[DataFile] = []
    try:
        for draft, data in zip(entry.files, prepared.tables, strict=True):
            written.append(_placed(store, entry, draft, data))
    except BaseException:
        _remove(store, written)
        raise
    committed = commit_entry(store, replace(entry, files=tuple(written)))
    if committed.files[0].path != written[0].path:  # another was first, with the same content
        _remove(store, written)
    return committed


def _placed(store: Store, entry: Entry, draft: DataFile, data: pa.Table) -> DataFile:
    """Write one file of a capture, and say what it came to."""
    path, temporary = data_path(entry.key, draft.table), store.temporary()
    try:
        size, footer, digest = write_table(temporary, TABLES[draft.table], data, draft.row_groups)
        store.place(temporary, path)
    finally:
        remove_if_there(temporary)
    return replace(draft, path=path, bytes=size, footer=footer, digest=digest)


def _remove(store: Store, files: Iterable[DataFile]) -> None:
    for file in files:
        store.remove(file.path)


def commit_entry(store: Store, entry: Entry) -> Entry:
    """Publish an entry whose files, if any, are in place.

    Returns:
        The entry in the lake: this one, or an equal one that was there.

    Raises:
        CaptureError: The key is taken by other content, or the entry is too large.
    """
    entry = replace(entry, created_us=now_us())
    path = entry_path(entry.key)
    try:
        data = entry_bytes(entry)
        if store.publish_if_absent(path, data):
            return entry
        existing = existing_entry(store, entry)
    except CaptureError:
        _remove(store, entry.files)
        raise
    if existing is None:
        raise CaptureError(
            f"capture of {entry.key}: {path} was there when it was published and is gone now",
            hint="Entries are never deleted while their run lives: look who removes them.",
            path=path,
        )
    return existing


def sweep_once(store: Store) -> None:
    """Remove what crashed writers left unfinished a day ago, once per process and lake."""
    if str(store) not in _swept:
        _swept.add(str(store))
        store.sweep(SWEEP_AFTER_S)


def existing_entry(store: Store, entry: Entry) -> Entry | None:
    """The entry that holds this key, if any.

    Raises:
        CaptureError: It is not a commit of the same content.
    """
    path = entry_path(entry.key)
    if not store.exists(path):
        return None
    existing = load_entry(store.read(path, MAX_BYTES), path)
    if same_content(existing, entry):
        return existing
    found = _difference(existing, load_entry(dump_entry(entry), path))
    raise CaptureError(
        f"{path}: {entry.key} is committed with other content: {found}",
        hint="A retry must hold the same data; a restarted job counts its attempt up.",
        path=path,
        key=entry.key,
    )


def _difference(old: Entry, new: Entry) -> str:
    """What differs, committed value first."""
    before, after = _facts(old), _facts(new)
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return "; ".join(
        f"{name} was {before.get(name, 'absent')}, is {after.get(name, 'absent')}"
        for name in names[:5]
    )


def _facts(entry: Entry) -> dict[str, object]:
    facts: dict[str, object] = {
        name: getattr(entry, name)
        for name in ("expected_ranks", "status", "owner", "cohort_size", "sources", "resumed_from")
    }
    facts |= {f"settings.{section}": values for section, values in entry.settings_tree.items()}
    for file in entry.files:
        facts["rows" if file is entry.files[0] else f"rows of {file.table}"] = file.rows
        for name, seal in file.columns.items():
            held = f" held in {seal.source_dtype}" if seal.source_dtype else ""
            where = f"column {name}" if file is entry.files[0] else f"column {file.table}.{name}"
            facts[where] = f"{seal.digest[:12]}{held}"
    for one in entry.outputs:
        where = f" of {one.micro_batch_id}" if one.micro_batch_id else ""
        facts[f"output {one.stage}.{one.field}{where}"] = one.value
    return facts


def entry_bytes(entry: Entry) -> bytes:
    """The bytes of an entry's file.

    Raises:
        CaptureError: No reader would take as many.
    """
    data = dump_entry(entry)
    if len(data) > MAX_BYTES:
        raise CaptureError(
            f"capture of {entry.key}: its entry takes {len(data)} bytes, expected at most "
            f"{MAX_BYTES}",
            hint="Record fewer scalars per sample or micro-batch, or split the capture.",
        )
    return data

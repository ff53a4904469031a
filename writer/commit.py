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


def commit_rows(store: Store, entry: Entry, *tables: TableRows) -> Entry:
    """Commit a capture with rows.

    Args:
        store: The lake.
        entry: Everything of the entry but its files.
        tables: Its rows, a file each.

    Returns:
        The entry in the lake: this one, or an equal one that was there.

    Raises:
        CaptureError: The key is taken by other content, or the entry is too large.
    """
    laid = [build_table(one.table, one.columns, one.rows) for one in tables]
    drafts = tuple(
        DataFile(
            table=one.table.name,
            path=data_path(entry.key, one.table.name),
            bytes=0,
            footer="",
            digest="",
            first_row_group=0,
            row_groups=row_groups,
            first_row=0,
            rows=one.rows,
            columns=seal_columns(data, one.source_dtypes),
        )
        for one, (data, row_groups) in zip(tables, laid, strict=True)
    )
    entry = replace(entry, files=drafts)
    if (existing := _existing(store, entry)) is not None:
        return existing
    written: list[DataFile] = []
    try:
        for draft, one, (data, row_groups) in zip(drafts, tables, laid, strict=True):
            written.append(_placed(store, draft, one.table, data, row_groups))
    except BaseException:
        _remove(store, written)
        raise
    committed = commit_entry(store, replace(entry, files=tuple(written)))
    if committed.files[0].path != drafts[0].path:  # another writer was first, with the same content
        _remove(store, written)
    return committed


def _placed(
    store: Store, draft: DataFile, table: Table, data: pa.Table, row_groups: tuple[int, ...]
) -> DataFile:
    """Write one file of a capture, and say what it came to."""
    temporary = store.temporary()
    try:
        size, footer, digest = write_table(temporary, table, data, row_groups)
        store.place(temporary, draft.path)
    finally:
        remove_if_there(temporary)
    return replace(draft, bytes=size, footer=footer, digest=digest)


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
        data = dump_entry(entry)
        _refuse_large(entry, len(data))
        if store.publish_if_absent(path, data):
            return entry
        existing = _existing(store, entry)
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


def _existing(store: Store, entry: Entry) -> Entry | None:
    """The entry that holds this key, if any, and only if it is a commit of the same content."""
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


def _refuse_large(entry: Entry, size: int) -> None:
    if size > MAX_BYTES:
        raise CaptureError(
            f"capture of {entry.key}: its entry takes {size} bytes, expected at most {MAX_BYTES}",
            hint="Record fewer scalars per sample or micro-batch, or split the capture.",
        )

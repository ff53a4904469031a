"""The commit protocol: a data file written aside, then one entry that is created only if absent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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


def commit_samples(
    store: Store,
    entry: Entry,
    table: Table,
    columns: Mapping[str, pa.Array | ListColumn],
    rows: int,
    source_dtypes: Mapping[str, str],
) -> Entry:
    """Commit a capture with rows.

    Args:
        store: The lake.
        entry: Everything of the entry but its file.
        table: The table of the rows.
        columns: The columns, without those that are all null.
        rows: Rows of every column.
        source_dtypes: dtype of each column as the producer held it.

    Returns:
        The entry in the lake: this one, or an equal one that was there.

    Raises:
        CaptureError: The key is taken by other content, or the entry is too large.
    """
    data, row_groups = build_table(table, columns, rows)
    draft = DataFile(
        table=table.name,
        path=data_path(entry.key, table.name),
        bytes=0,
        footer="",
        digest="",
        first_row_group=0,
        row_groups=row_groups,
        first_row=0,
        rows=rows,
        columns=seal_columns(data, source_dtypes),
    )
    entry = replace(entry, files=(draft,))
    if (existing := _existing(store, entry)) is not None:
        return existing
    temporary = store.temporary()
    try:
        size, footer, digest = write_table(temporary, table, data, row_groups)
        store.place(temporary, draft.path)
    finally:
        remove_if_there(temporary)
    written = replace(draft, bytes=size, footer=footer, digest=digest)
    committed = commit_entry(store, replace(entry, files=(written,)))
    if committed.files[0].path != draft.path:  # another writer was first, with the same content
        store.remove(draft.path)
    return committed


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
        for file in entry.files:
            store.remove(file.path)
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
        facts["rows"] = file.rows
        for name, seal in file.columns.items():
            held = f" held in {seal.source_dtype}" if seal.source_dtype else ""
            facts[f"column {name}"] = f"{seal.digest[:12]}{held}"
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

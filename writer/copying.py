"""Captures copied from one lake into another, without a changed value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.entry_codec import dump_entry
from trajreplay.schema.errors import CaptureError, DatasetError
from trajreplay.schema.filedigest import bytes_digest
from trajreplay.schema.layout import attempt_path, entry_path
from trajreplay.schema.policy import Redaction
from trajreplay.schema.publish import remove_if_there, write_synced
from trajreplay.schema.store import Store
from trajreplay.schema.tables import EVENTS, TABLES
from trajreplay.writer.commit import TableRows, commit_rows, prepare_rows


def copy_capture(
    source: Store, target: Store, entry: Entry, redaction: Mapping[str, str] | None = None
) -> Entry:
    """Copy one capture, its files byte for byte, and the record of its attempt.

    A file that it shares with other captures is written anew, with its own rows alone.

    Args:
        source: The lake that has it.
        target: The lake that gets it.
        entry: The capture.
        redaction: Stricter rules by text field; the columns of such text are written anew.

    Returns:
        The entry in the target.

    Raises:
        DatasetError: A file is not what the entry says.
        CaptureError: A rule keeps more than the one in force.
    """
    copy_attempt(source, target, entry)
    rules = _tightened(entry, redaction or {})
    contents = {file.path: verified_bytes(source, file) for file in entry.files}
    shared = any(_is_shared(file, contents[file.path]) for file in entry.files)
    if entry.files and (shared or rules != dict(entry.redaction)):
        return _rewritten(target, entry, rules, contents)
    for path, content in contents.items():
        if not target.exists(path):
            _place(target, path, content)
    copied = replace(entry, redaction=rules)
    target.publish_if_absent(entry_path(entry.key), dump_entry(copied))
    return copied


def copy_events_beside(source: Store, target: Store, entry: Entry) -> bool:
    """Copy events whose name the target gave to others, under the next step that is free.

    They are named after the first of several steps, which a step that is tried again, or another
    recorder of this attempt, may have named before. Done again, it finds its copy.

    Args:
        source: The lake that has them.
        target: The lake that gets them.
        entry: The events, of a step.

    Returns:
        Whether they were not there before.

    Raises:
        DatasetError: A file is not what the entry says.
        CaptureError: The entry is refused, and not for its name.
    """
    copy_attempt(source, target, entry)
    step_id = entry.key.step_id
    assert step_id is not None
    found = [captured_rows(one, verified_bytes(source, one)) for one in entry.files]
    while True:
        step_id += 1
        key = entry.key._replace(step_id=step_id)
        moved = prepare_rows(
            replace(entry, key=key), *(_under_step(step_id, rows) for rows in found)
        )
        _refuse_other_values(entry, moved.entry, "step_id")
        was_there = target.exists(entry_path(key))
        try:
            commit_rows(target, moved)
            return not was_there
        except CaptureError:
            if not target.exists(entry_path(key)):
                raise


def _under_step(step_id: int, rows: pa.Table) -> TableRows:
    """Rows of events with the key of another step."""
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    columns["step_id"] = pa.repeat(pa.scalar(step_id, EVENTS["step_id"].type), len(rows))
    return TableRows(EVENTS, columns, len(rows))


def _refuse_other_values(entry: Entry, copy: Entry, but_of: str) -> None:
    """Refuse a copy whose values, but those of one column, are not those that were captured."""
    for file, other in zip(entry.files, copy.files, strict=True):
        for name in file.columns.keys() - {but_of}:
            if other.columns[name].digest != file.columns[name].digest:
                raise DatasetError(
                    f"{file.path} column {name} has other values than those that were captured",
                    hint="The disk that has it is at fault: look at it, and at its other captures.",
                    path=file.path,
                    column=name,
                )


def copy_attempt(source: Store, target: Store, entry: Entry) -> None:
    """Copy the record of the attempt of a capture, unless it is there."""
    record = attempt_path(entry.key.run_id, entry.key.attempt)
    if not target.exists(record):
        target.publish_if_absent(record, source.read(record, MAX_BYTES))


def _tightened(entry: Entry, stricter: Mapping[str, str]) -> dict[str, str]:
    rules = dict(entry.redaction)
    for name, rule in stricter.items():
        if not Redaction({name: rule}).tightens(Redaction({name: rules.get(name, "drop")}), name):
            raise CaptureError(
                f"{entry.key}: {name} is kept under the rule {rules.get(name, 'drop')}, and {rule} "
                "keeps more or something else",
                hint="An export can only tighten a redaction: truncate:N to less, hash or drop.",
            )
        if name in rules or rule != "drop":
            rules[name] = rule
    return rules


def verified_bytes(store: Store, file: DataFile) -> bytes:
    """The bytes of a data file.

    Raises:
        DatasetError: They are not those that its entry names.
    """
    content = store.read(file.path, file.bytes)
    if bytes_digest(content) != file.digest:
        raise DatasetError(
            f"{file.path} is not the file that its entry names: its bytes have another digest",
            hint="Restore it from a copy of the lake; what else is affected: trajreplay validate",
            path=file.path,
        )
    return content


def captured_rows(file: DataFile, content: bytes) -> pa.Table:
    """The rows of a capture, out of the bytes of its file, with the declared types.

    Args:
        file: The file, as the entry has it.
        content: Its bytes, verified.
    """
    groups = range(file.first_row_group, file.first_row_group + len(file.row_groups))
    parquet = pq.ParquetFile(pa.BufferReader(content))
    rows = parquet.read_row_groups(list(groups), use_threads=False)
    rows = rows.slice(file.first_row, file.rows)
    fields = [one.field for one in TABLES[file.table].columns if one.name in file.columns]
    return pa.Table.from_arrays(
        [rows[one.name].cast(one.type) for one in fields], schema=pa.schema(fields)
    )


def _is_shared(file: DataFile, content: bytes) -> bool:
    """Whether a file has rows of other captures, too."""
    there: int = pq.read_metadata(pa.BufferReader(content)).num_rows
    return there != file.rows


def _place(store: Store, path: str, content: bytes) -> None:
    aside = store.temporary()
    try:
        write_synced(aside, content)
        store.place(aside, path)
    finally:
        remove_if_there(aside)


def _rewritten(
    target: Store, entry: Entry, rules: Mapping[str, str], contents: Mapping[str, bytes]
) -> Entry:
    """Commit a capture with less text; every other column has to keep its digest."""
    # What is a hash already is not hashed again.
    changed = {name: rule for name, rule in rules.items() if entry.redaction.get(name) != rule}
    redaction = Redaction(changed)
    tables = [_redacted(file, contents[file.path], redaction) for file in entry.files]
    copied = commit_rows(target, prepare_rows(replace(entry, redaction=rules), *tables))
    for file, copy in zip(entry.files, copied.files, strict=True):
        kept = {one.name for one in TABLES[file.table].columns if one.role != "text"}
        for name in kept & set(file.columns):
            if copy.columns[name].digest != file.columns[name].digest:
                raise DatasetError(f"{entry.key}: {name} changed in the copy, which is a mistake")
    return copied


def _redacted(file: DataFile, content: bytes, redaction: Redaction) -> TableRows:
    """The rows of a file with as much text as a policy leaves."""
    table = TABLES[file.table]
    rows = captured_rows(file, content)
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    for one in table.having("text"):
        if one.name in columns and one.name in redaction.rules:
            texts = [redaction.apply(one.name, text) for text in columns[one.name].to_pylist()]
            columns[one.name] = pa.array(texts, pa.string())
    columns = {name: one for name, one in columns.items() if one.null_count < len(one)}
    dtypes = {name: seal.source_dtype for name, seal in file.columns.items() if seal.source_dtype}
    return TableRows(table, columns, file.rows, dtypes)

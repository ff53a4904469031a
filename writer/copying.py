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
from trajreplay.schema.tables import TABLES
from trajreplay.writer.commit import TableRows, commit_rows


def copy_capture(
    source: Store, target: Store, entry: Entry, redaction: Mapping[str, str] | None = None
) -> Entry:
    """Copy one capture, its files byte for byte, and the record of its attempt.

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
    record = attempt_path(entry.key.run_id, entry.key.attempt)
    if not target.exists(record):
        target.publish_if_absent(record, source.read(record, MAX_BYTES))
    rules = _tightened(entry, redaction or {})
    contents = {file.path: _verified(source, file) for file in entry.files}
    if rules != dict(entry.redaction) and entry.files:
        return _rewritten(target, entry, rules, contents)
    for path, content in contents.items():
        if not target.exists(path):
            _place(target, path, content)
    copied = replace(entry, redaction=rules)
    target.publish_if_absent(entry_path(entry.key), dump_entry(copied))
    return copied


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


def _verified(store: Store, file: DataFile) -> bytes:
    content = store.read(file.path, file.bytes)
    if bytes_digest(content) != file.digest:
        raise DatasetError(
            f"{file.path} is not the file that its entry names: its bytes have another digest",
            hint="Restore it from a copy of the lake; what else is affected: trajreplay validate",
            path=file.path,
        )
    return content


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
    copied = commit_rows(target, replace(entry, redaction=rules), *tables)
    for file, copy in zip(entry.files, copied.files, strict=True):
        kept = {one.name for one in TABLES[file.table].columns if one.role != "text"}
        for name in kept & set(file.columns):
            if copy.columns[name].digest != file.columns[name].digest:
                raise DatasetError(f"{entry.key}: {name} changed in the copy, which is a mistake")
    return copied


def _redacted(file: DataFile, content: bytes, redaction: Redaction) -> TableRows:
    """The rows of a file with as much text as a policy leaves."""
    table = TABLES[file.table]
    rows = pq.read_table(pa.BufferReader(content)).slice(file.first_row, file.rows)
    columns = {name: rows[name].combine_chunks().cast(table[name].type) for name in file.columns}
    for one in table.having("text"):
        if one.name in columns and one.name in redaction.rules:
            texts = [redaction.apply(one.name, text) for text in columns[one.name].to_pylist()]
            columns[one.name] = pa.array(texts, pa.string())
    columns = {name: one for name, one in columns.items() if one.null_count < len(one)}
    dtypes = {name: seal.source_dtype for name, seal in file.columns.items() if seal.source_dtype}
    return TableRows(table, columns, file.rows, dtypes)

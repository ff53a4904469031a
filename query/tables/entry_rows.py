"""Rows of the tables that live in manifest entries: outputs, manifest, checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

from trajreplay.query.files.reading import read_columns
from trajreplay.schema.entry import Entry, Output
from trajreplay.schema.errors import SchemaError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.store import Store
from trajreplay.schema.tables import SAMPLE_TABLES

Rows = Iterator[dict[str, Any]]
_SCALAR = (
    *("stage", "field", "scope", "micro_batch_id", "value", "reduction"),
    *("numerator", "denominator", "scale"),
)
EntryRows = Callable[[Store, Entry, Collection[str]], Rows]


def manifest_rows(store: Store, entry: Entry, columns: Collection[str]) -> Rows:
    """The row of one capture."""
    del store, columns
    yield entry.key._asdict() | {
        "status": entry.status,
        "owner": entry.owner,
        "expected_ranks": list(entry.expected_ranks),
        "rows": entry.rows,
        "tokens": entry.tokens,
        "bytes": sum(file.bytes for file in entry.files),
        "path": entry.files[0].path if entry.files else None,
        "created": entry.created_us,
        "producer": _json(dict(entry.producer)),
        "parallel": _json(vars(entry.parallel)),
        "settings": _json(_settings(entry)),
        "contracts": _json({name: one.to_json() for name, one in entry.contracts.items()}),
        "sources": _json(entry.sources),
        "redaction": _json(dict(entry.redaction)),
    }


def checksum_rows(store: Store, entry: Entry, columns: Collection[str]) -> Rows:
    """One row per file of a capture, and one per column of the file."""
    del store, columns
    key = _capture(entry.key)
    for file in entry.files:
        yield key | {
            "table": file.table,
            "column": None,
            "digest": file.digest,
            "values": file.rows,
            "bytes": file.bytes,
        }
        for name, seal in file.columns.items():
            yield key | {
                "table": file.table,
                "column": name,
                "digest": seal.digest,
                "values": seal.values,
                "non_finite": seal.non_finite,
                "source_dtype": seal.source_dtype,
            }


def output_rows(store: Store, entry: Entry, columns: Collection[str]) -> Rows:
    """One row per recorded scalar; at scope sample one per sample.

    Raises:
        DatasetError: The sample ids are wanted and their file is not what the entry says.
    """
    ids: list[str] | None = None
    for output in entry.outputs:
        row = _capture(entry.key) | _scalar(output)
        if output.values is None:
            yield row
            continue
        if ids is None and "sample_id" in columns:
            table = SAMPLE_TABLES[entry.key.kind]
            ids = read_columns(store, entry, table, ["sample_id"]).column(0).to_pylist()
        for index, value in enumerate(output.values):
            sample_id = ids[index] if ids is not None and index < len(ids) else None
            yield row | {"row": index, "value": value, "sample_id": sample_id}


def _scalar(output: Output) -> dict[str, Any]:
    return {name: getattr(output, name) for name in _SCALAR}


def _capture(key: CaptureKey) -> dict[str, Any]:
    fields = key._asdict()
    del fields["part"]
    return fields


def _settings(entry: Entry) -> Any:
    try:
        return entry.settings.to_json()
    except SchemaError:
        return dict(entry.settings_tree)  # written by a newer version: as it is stored


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))

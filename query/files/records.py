"""Captures of a lake as records, for formats of other tools to be written from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from trajreplay.query.files.reading import read_columns
from trajreplay.schema.bundles.record import CaptureRecord, Scalars
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.dtypes import restore
from trajreplay.schema.entry import Entry, Output
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ProducerInfo
from trajreplay.schema.lists import elements
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.store import Store
from trajreplay.schema.tables import ROUTES, SAMPLE_TABLES

_RECORD_FIELDS = tuple(SampleRecord.__dataclass_fields__)


def read_record(store: Store, entry: Entry) -> CaptureRecord:
    """Read one capture, every column verified.

    Args:
        store: The lake.
        entry: The capture.

    Returns:
        Its record. A column that some samples lack is left out, with a note.

    Raises:
        DatasetError: The file is not what the entry says.
    """
    table = SAMPLE_TABLES[entry.key.kind]
    file = entry.file(table.name)
    held: Mapping[str, Any] = file.columns if file is not None else {}
    names = [one.name for one in table.columns if one.name in held and one.role != "key"]
    rows = read_columns(store, entry, table, names)
    tensors: dict[str, Any] = {}
    notes: list[str] = []
    for name in [one for one in names if table[one].is_float_list]:
        column = rows[name]
        if column.null_count:
            notes.append(f"{entry.key}: {column.null_count} samples have no {name}: left out")
            continue
        parts = [elements(chunk) for chunk in column.chunks] or [pa.array([], pa.float32())]
        values = pa.concat_arrays(parts).to_numpy(zero_copy_only=False)
        dtype = held[name].source_dtype or "float32"
        tensors[name] = TensorValue(restore(values, dtype), dtype)
    if entry.file(ROUTES.name) is not None:
        notes.append(f"{entry.key}: expert choices have no place in a bundle: left out")
    fields = [name for name in names if name in _RECORD_FIELDS]
    samples = tuple(SampleRecord(**one) for one in _as_records(rows.select(fields)))
    key = entry.key
    if key.rollout_id is None:
        raise DatasetError(f"{key} is of no rollout, expected samples of one")
    return CaptureRecord(
        run_id=key.run_id,
        rollout_id=key.rollout_id,
        step_id=key.step_id,
        rank=key.rank,
        expected_ranks=entry.expected_ranks,
        settings=entry.settings,
        samples=samples,
        tensors=tensors,
        scalars=tuple(map(_scalars, entry.outputs)),
        stages=tuple(entry.contracts.values()),
        tolerances=entry.tolerances,
        origins=entry.origins,
        producer=_producer(entry.producer),
        parallel=entry.parallel,
        redaction=entry.redaction,
        reward_dtype=_reward_dtype(held),
        notes=tuple(notes),
    )


def _reward_dtype(held: Mapping[str, Any]) -> str:
    dtypes = [held[name].source_dtype for name in ("reward", "raw_reward") if name in held]
    return next((one for one in dtypes if one), CaptureRecord.reward_dtype)


def _as_records(rows: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rows.to_pylist()
    for one in found:
        spans = one.get("weight_versions")
        if spans is not None:
            one["weight_versions"] = [(s["start"], s["stop"], s["version"]) for s in spans]
    return found


def _scalars(one: Output) -> Scalars:
    value = list(one.values) if one.values is not None else one.value
    return Scalars(
        one.stage,
        {one.field: value},
        scope=one.scope,
        reduction=one.reduction,
        micro_batch_id=one.micro_batch_id,
        denominator=None if one.denominator is None else {one.field: one.denominator},
        scale=one.scale,
    )


def _producer(tree: Mapping[str, Any]) -> ProducerInfo:
    known = {name: tree[name] for name in ProducerInfo.__dataclass_fields__ if name in tree}
    return ProducerInfo(**known)

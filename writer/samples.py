"""Sample records as columns: everything about the samples that is not a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.columns import Table
from trajreplay.schema.errors import CaptureError, listed, shown
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.policy import Redaction
from trajreplay.schema.records import SampleLists, SampleRecord, values_of
from trajreplay.schema.shards import PLACING
from trajreplay.schema.tables import SPANS, length_column
from trajreplay.writer.components import encode_components
from trajreplay.writer.encode import ListColumn, encode_column
from trajreplay.writer.flatten import Array
from trajreplay.writer.ragged import mask_problems
from trajreplay.writer.record_checks import COUNTS, IDS, all_none, check_values, refuse

_REWARDS = ("raw_reward", "reward")
_SCORES = (*_REWARDS, "greedy_reward", "kept_baseline", "last_value")
_FIELDS = (*IDS, *COUNTS, *_SCORES, "group_index", "weight_versions", "truncated", "loss_mask")
_fields_of = attrgetter(*_FIELDS)


@dataclass(frozen=True)
class SampleColumns:
    """The records of a capture as columns.

    Args:
        scalars: Arrow arrays by column name, all-null ones left out.
        masks: The loss masks.
        sample_ids: Ids in row order, for messages.
        response_length, total_length: Lengths in row order.
        sources: Distinct (attempt, rollout) that the samples came from.
        source_dtypes: dtype of columns whose values the producer held in another.
    """

    scalars: dict[str, pa.Array]
    masks: ListColumn
    sample_ids: list[str]
    response_length: Array
    total_length: Array
    sources: tuple[tuple[int, int], ...]
    source_dtypes: dict[str, str]

    def lengths(self, name: str) -> Array:
        """Values that each row of a tensor column must have."""
        expected: Array = getattr(self, length_column(name))
        return expected

    @property
    def sharded(self) -> bool:
        """Whether a row says which shard of its sample it is."""
        return "context_size" in self.scalars

    def placing(self) -> dict[str, Any]:
        """What rows say of where their shards lie, as arguments of `row_places`."""
        found = {key: self.scalars.get(name) for key, name in PLACING.items()}
        return {key: None if one is None else one.to_pylist() for key, one in found.items()}

    @property
    def rows(self) -> int:
        """Samples."""
        return len(self.sample_ids)

    def columns(self, key: CaptureKey, table: Table) -> dict[str, pa.Array | ListColumn]:
        """All columns of these samples, the keys of their capture among them."""
        rows = self.rows
        keys: dict[str, pa.Array | ListColumn] = {
            name: pa.repeat(pa.scalar(getattr(key, name), table[name].type), rows)
            for name in table.key
            if name != "row"
        }
        keys["row"] = pa.array(np.arange(rows, dtype=np.int32))
        return keys | self.scalars | {"loss_mask": self.masks}


def encode_samples(
    records: Sequence[SampleRecord],
    key: CaptureKey,
    table: Table,
    redaction: Redaction,
    reward_dtype: str = "float32",
    components: Sequence[str] = (),
) -> SampleColumns:
    """Turn records into columns of a table.

    Args:
        records: The samples.
        key: Their capture.
        table: The table.
        redaction: What may be kept of text.
        reward_dtype: dtype in which the trainer computed the rewards.
        components: Names of the components of a reward, in order.

    Raises:
        CaptureError: Records that no row can represent; all problems of a kind at once.
    """
    values = _drawn(records)
    if not all_none(values["group_index"]):
        values["group_id"] = [record.group for record in records]
    values["source_attempt"] = _filled(values["source_attempt"], key.attempt)
    values["source_rollout_id"] = _filled(values["source_rollout_id"], key.rollout_id)
    ids = values["sample_id"]
    check_values(values, key)
    scalars = {
        name: pa.array(values[name], table[name].type)
        for name in (*IDS, *COUNTS)
        if name in table and not all_none(values[name])
    }
    scalars |= {name: _rewards(name, values[name], key) for name in _SCORES}
    scalars["reward_components"] = encode_components(records, components, key)
    scalars["weight_versions"] = _spans(values["weight_versions"], key)
    scalars["truncated"] = _flags(values["truncated"], key)
    for column in table.having("text"):
        texts = values_of(records, column.name)
        if all_none(texts):
            continue
        texts = [redaction.apply(column.name, text) for text in texts]
        scalars[column.name] = pa.array(texts, pa.string())
    masks = encode_column(table["loss_mask"], values["loss_mask"])
    lengths = np.array(values["response_length"], np.int64)
    refuse(mask_problems(masks, lengths, ids), key)
    sources = zip(values["source_attempt"], values["source_rollout_id"], strict=True)
    return SampleColumns(
        {name: array for name, array in scalars.items() if array.null_count < len(array)},
        masks,
        ids,
        lengths,
        np.array(values["total_length"], np.int64),
        tuple(sorted(set(sources))) if key.kind == "step" else (),
        dict.fromkeys((*_SCORES, "reward_components"), reward_dtype),
    )


def _drawn(records: Sequence[SampleRecord]) -> dict[str, list[Any]]:
    """The fields of records by name, in row order."""
    if isinstance(records, SampleLists) or not records:
        return {name: list(values_of(records, name)) for name in _FIELDS}
    drawn = zip(*map(_fields_of, records), strict=True)
    return dict(zip(_FIELDS, map(list, drawn), strict=True))


def _filled(values: list[Any], default: int | None) -> list[Any]:
    return [default if value is None else value for value in values]


def _rewards(name: str, values: list[Any], key: CaptureKey) -> pa.Array:
    if all_none(values):
        return pa.nulls(len(values), pa.float64())
    try:
        floats = [None if value is None else float(value) for value in values]
    except (TypeError, ValueError) as error:
        kinds = sorted({shown(value) for value in values if not isinstance(value, (int, float))})
        raise CaptureError(
            f"capture of {key}: {name} is no number: {listed(kinds, 3)}", column=name
        ) from error
    return pa.array(floats, pa.float64())


def _flags(values: list[Any], key: CaptureKey) -> pa.Array:
    if all_none(values):
        return pa.nulls(len(values), pa.bool_())
    odd = [value for value in values if value is not None and not isinstance(value, bool)]
    if odd:
        raise CaptureError(
            f"capture of {key}: truncated is {shown(odd[0])}, expected true or false"
        )
    return pa.array(values, pa.bool_())


def _spans(rows: list[Any], key: CaptureKey) -> pa.Array:
    if all_none(rows):
        return pa.nulls(len(rows), SPANS)
    flat = [tuple(span) for row in rows if row is not None for span in row]
    odd = [span for span in flat if len(span) != 3 or any(type(one) is not int for one in span)]
    if odd:
        raise CaptureError(
            f"capture of {key}: weight_versions has {shown(odd[0])}, expected (start, stop, "
            "version)",
            column="weight_versions",
        )
    fields = list(SPANS.value_type)
    parts = [pa.array([span[i] for span in flat], fields[i].type) for i in range(len(fields))]
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([0 if row is None else len(row) for row in rows], out=offsets[1:])
    spans = pa.StructArray.from_arrays(parts, fields=fields)
    missing = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), spans, type=SPANS, mask=missing)

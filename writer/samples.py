"""Sample records as columns: everything about the samples that is not a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.columns import Table
from trajreplay.schema.errors import CaptureError, SchemaError, listed, shown
from trajreplay.schema.identity import CaptureKey, check_id
from trajreplay.schema.policy import Redaction
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.tables import SPANS, length_column
from trajreplay.writer.components import encode_components
from trajreplay.writer.encode import ListColumn, encode_column
from trajreplay.writer.flatten import Array
from trajreplay.writer.ragged import mask_problems

_IDS = (
    *("sample_id", "group_id", "rollout_partition_id", "consumer_batch_id", "micro_batch_id"),
    *("trajectory_id", "agent_id", "episode_id"),
)
_REWARDS = ("raw_reward", "reward")
_SCORES = (*_REWARDS, "greedy_reward", "kept_baseline", "last_value")
_TEXTS = ("prompt", "response", "label", "tool_output")
_COUNTS = {
    "response_length": 2**31 - 1,
    "total_length": 2**31 - 1,
    "group_size": 2**31 - 1,
    "context_rank": 2**31 - 1,
    "context_size": 2**31 - 1,
    "fragment_index": 2**31 - 1,
    "turns": 2**31 - 1,
    "source_attempt": 2**31 - 1,
    "source_rollout_id": 2**63 - 1,
}
_NEVER_NULL = ("response_length", "total_length")
_FIELDS = (*_IDS, *_COUNTS, *_SCORES, "group_index", "weight_versions", "truncated", "loss_mask")
_TEXT_TYPES = frozenset((str, type(None)))
_texts_of, _fields_of = attrgetter(*_TEXTS), attrgetter(*_FIELDS)
_PLAIN_ID_CHARACTERS = 42  # percent-encoding takes three bytes a character, an id has 128


def check_records(records: Any) -> list[SampleRecord]:
    """Return what was handed over as a list of records.

    Raises:
        CaptureError: It is no sequence of `SampleRecord`, or a record has text that is none.
    """
    hint = "capture.samples([SampleRecord(sample_id=..., ...), ...])"
    if not isinstance(records, Iterable):
        kind = type(records).__name__
        raise CaptureError(
            f"samples() was given one {kind}, expected a sequence of SampleRecord", hint=hint
        )
    found = list(records)
    if set(map(type, found)) == {SampleRecord} and not any(map(_odd_text, found)):
        return found
    for row, one in enumerate(found):
        if not isinstance(one, SampleRecord):
            kind = type(one).__name__
            raise CaptureError(
                f"samples() was given a {kind} in row {row}, expected SampleRecord", hint=hint
            )
        for name in _TEXTS:
            text = getattr(one, name)
            if text is not None and not isinstance(text, str):
                raise CaptureError(
                    f"row {row}, sample {one.sample_id!r}: {name} is {shown(text)}, expected text",
                )
    return found


def _odd_text(record: SampleRecord) -> bool:
    """Whether a record has something else for text."""
    return not _TEXT_TYPES.issuperset(map(type, _texts_of(record)))


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

    def placing(self) -> dict[str, list[Any] | None]:
        """What rows say of where their shards lie, as arguments of `row_places`."""
        names = {"ranks": "context_rank", "sizes": "context_size", "batches": "micro_batch_id"}
        found = {key: self.scalars.get(name) for key, name in names.items()}
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
    drawn = zip(*map(_fields_of, records), strict=True)
    values = dict(zip(_FIELDS, map(list, drawn), strict=True)) if records else _nothing()
    if not _all_none(values["group_index"]):
        values["group_id"] = [record.group for record in records]
    values["source_attempt"] = _filled(values["source_attempt"], key.attempt)
    values["source_rollout_id"] = _filled(values["source_rollout_id"], key.rollout_id)
    ids = values["sample_id"]
    _refuse([*_id_problems(values), *_count_problems(values)], key)
    _refuse(_shard_problems(values), key)
    if key.kind == "rollout":
        _refuse(_foreign(values, key), key)
    _refuse(_duplicates(values), key)
    scalars = {
        name: pa.array(values[name], table[name].type)
        for name in (*_IDS, *_COUNTS)
        if name in table and not _all_none(values[name])
    }
    scalars |= {name: _rewards(name, values[name], key) for name in _SCORES}
    scalars["reward_components"] = encode_components(records, components, key)
    scalars["weight_versions"] = _spans(values["weight_versions"], key)
    scalars["truncated"] = _flags(values["truncated"], key)
    for column in table.having("text"):
        texts = [getattr(record, column.name) for record in records]
        if _all_none(texts):
            continue
        texts = [redaction.apply(column.name, text) for text in texts]
        scalars[column.name] = pa.array(texts, pa.string())
    masks = encode_column(table["loss_mask"], values["loss_mask"])
    lengths = np.array(values["response_length"], np.int64)
    _refuse(mask_problems(masks, lengths, ids), key)
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


def _nothing() -> dict[str, list[Any]]:
    """The fields of no record."""
    return {name: [] for name in _FIELDS}


def _filled(values: list[Any], default: int | None) -> list[Any]:
    return [default if value is None else value for value in values]


def _foreign(values: dict[str, list[Any]], key: CaptureKey) -> list[str]:
    own = (key.attempt, key.rollout_id)
    sources = zip(values["source_attempt"], values["source_rollout_id"], strict=True)
    return [
        f"row {row}: sample {values['sample_id'][row]!r} comes from attempt {source[0]} rollout "
        f"{source[1]}, expected the rollout that is captured"
        for row, source in enumerate(sources)
        if source != own
    ]


def _refuse(problems: list[str], key: CaptureKey) -> None:
    if problems:
        raise CaptureError(
            f"capture of {key}: {len(problems)} problems of samples:\n  {listed(problems)}",
            hint="Nothing was committed. Correct the records and capture again.",
            problems=problems,
        )


def _id_problems(values: dict[str, list[Any]]) -> list[str]:
    problems = []
    for name in _IDS:
        if name != "sample_id" and _all_none(values[name]):
            continue
        for row, value in enumerate(values[name]):
            if _is_plain(value) or (value is None and name != "sample_id"):
                continue
            try:
                check_id(name, value)
            except SchemaError as error:
                problems.append(f"row {row}: {error.message}")
    return problems


def _all_none(values: list[Any]) -> bool:
    return values.count(None) == len(values)


def _is_plain(value: object) -> bool:
    """Whether an id passes every check at a glance, as nearly all do."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _PLAIN_ID_CHARACTERS
        and value.isascii()
        and value.isprintable()
        and value not in (".", "..")
    )


def _shard_problems(values: dict[str, list[Any]]) -> list[str]:
    if _all_none(values["context_rank"]) and _all_none(values["context_size"]):
        return []
    pairs = zip(values["context_rank"], values["context_size"], strict=True)
    return [
        f"row {row}: context_rank and context_size of sample {values['sample_id'][row]!r} are "
        f"{rank} and {size}, expected a rank below its size, or neither"
        for row, (rank, size) in enumerate(pairs)
        if (rank is None) != (size is None) or (rank is not None and rank >= size)
    ]


def _count_problems(values: dict[str, list[Any]]) -> list[str]:
    problems = []
    for name, limit in _COUNTS.items():
        found = values[name]
        if name not in _NEVER_NULL and _all_none(found):
            continue
        for row, value in enumerate(found):
            if type(value) is int and 0 <= value <= limit:
                continue
            if isinstance(value, np.integer) and 0 <= value <= limit:
                found[row] = int(value)
            elif value is not None or name in _NEVER_NULL:
                sample = values["sample_id"][row]
                problems.append(
                    f"row {row}: {name} of sample {sample!r} is {shown(value)}, expected an "
                    f"integer from 0 to {limit}"
                )
    return problems


def _duplicates(values: dict[str, list[Any]]) -> list[str]:
    names = ("sample_id", "source_attempt", "source_rollout_id")
    there = list(zip(*(values[name] for name in names), strict=True))
    if len(set(there)) == len(there):
        return []
    return [
        f"sample_id {sample!r} of rollout {rollout} occurs {times} times, expected once"
        for (sample, _, rollout), times in Counter(there).items()
        if times > 1
    ]


def _rewards(name: str, values: list[Any], key: CaptureKey) -> pa.Array:
    if _all_none(values):
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
    if _all_none(values):
        return pa.nulls(len(values), pa.bool_())
    odd = [value for value in values if value is not None and not isinstance(value, bool)]
    if odd:
        raise CaptureError(
            f"capture of {key}: truncated is {shown(odd[0])}, expected true or false"
        )
    return pa.array(values, pa.bool_())


def _spans(rows: list[Any], key: CaptureKey) -> pa.Array:
    if _all_none(rows):
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

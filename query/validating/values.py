"""The values of a capture against its entry and each other: counts, lengths, masks, text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.schema.columns import Column, Table
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.lists import elements, list_place, non_finite
from trajreplay.schema.policy import TEXT_FIELDS, Redaction
from trajreplay.schema.shards import PLACING, row_places, shard_lengths
from trajreplay.schema.tables import OWN_LENGTH, TABLES, length_column

LENGTHS = ("response_length", "total_length")
Columns = Mapping[str, pa.ChunkedArray]


def values_problems(
    entry: Entry, file: DataFile, found: Columns, lengths: Columns
) -> Iterator[str]:
    """Where decoded columns hold others than their seals count, or lists of other lengths."""
    table = TABLES[file.table]
    right: set[object] = set()  # columns made with the same offsets are looked at once
    for name, values in found.items():
        column, seal = table[name], file.columns[name]
        if values.null_count != seal.nulls:
            yield f"column {name} has {values.null_count} nulls, its entry says {seal.nulls}"
        inner = [elements(chunk) for chunk in values.chunks] if column.is_list else values.chunks
        if (size := sum(map(len, inner))) != seal.values:
            yield f"column {name} has {size} values, its entry says {seal.values}"
        if column.is_floating and (count := sum(map(non_finite, inner))) != seal.non_finite:
            yield f"column {name} has {count} non-finite values, its entry says {seal.non_finite}"
        if name == "loss_mask":
            highest = max((pc.max(one).as_py() or 0 for one in inner), default=0)
            if highest > 1:
                yield f"loss_mask has the value {highest}, expected 0 or 1"
        if name == "reward_components":
            yield from _component_problems(entry, values)
        if not column.is_list or name in OWN_LENGTH:
            continue
        place = length_column(name), list_place(values)
        if place in right:
            continue
        if _is_shard(entry, column, values, lengths):
            continue
        wrong = list(_length_problems(column, values, lengths))
        yield from wrong
        if not wrong and place[1] is not None:
            right.add(place)


def _component_problems(entry: Entry, values: pa.ChunkedArray) -> Iterator[str]:
    expected = len(entry.settings.reward.weights)
    differs = pc.fill_null(pc.not_equal(pc.list_value_length(values), expected), False)
    if count := pc.sum(differs).as_py() or 0:
        row = pc.index(differs, True).as_py()
        yield (
            f"row {row}: reward_components has {len(values[row])} values, expected {expected}, one "
            f"for each of reward.weights ({count} rows like it)"
        )


def _is_shard(entry: Entry, column: Column, values: pa.ChunkedArray, lengths: Columns) -> bool:
    """Whether a rank of a context-parallel group holds just its tokens of a column."""
    sharded = entry.parallel.context_size > 1 or "context_size" in lengths
    if not sharded or not lengths.keys() >= set(LENGTHS):
        return False
    layout = entry.settings.layout
    total, response = (lengths[name].to_numpy() for name in ("total_length", "response_length"))
    stated = {key: lengths[name].to_pylist() for key, name in PLACING.items() if name in lengths}
    try:
        places = row_places(layout, entry.parallel, total, **stated)
    except DatasetError:
        return False  # it cannot be told what a rank holds: the lists have to be whole
    held = shard_lengths(column.name, layout, places, total, response)
    if held is None:
        return False
    found = pc.list_value_length(values)
    return not pc.any(pc.not_equal(found.cast(pa.int64()), pa.array(held))).as_py()


def _length_problems(column: Column, values: pa.ChunkedArray, lengths: Columns) -> Iterator[str]:
    expected = lengths.get(length_column(column.name))
    if expected is None:
        return
    found = pc.list_value_length(values)
    if found.equals(expected):
        return
    differs = pc.fill_null(pc.not_equal(found, expected), False)
    count = pc.sum(differs).as_py() or 0
    if count:
        row = pc.index(differs, True).as_py()
        yield (
            f"row {row}: {column.name} has {len(values[row])} values, expected "
            f"{length_column(column.name)} = {expected[row]} ({count} rows like it)"
        )


def redaction_problems(entry: Entry, table: Table, found: Columns) -> Iterator[str]:
    """What the text columns store that the capture's redaction policy does not leave."""
    texts = [name for name in found if name in TEXT_FIELDS and name in table]
    if not texts and not entry.redaction:
        return
    try:
        policy = Redaction(entry.redaction)
    except SchemaError as error:
        yield f"the entry's policy cannot be read: {error.message}"
        return
    for name in texts:
        for text in pc.unique(found[name]).to_pylist():
            if problem := policy.problem(name, text):
                yield f"{name} {problem}"
                break


def total_problems(entry: Entry, lengths: Columns) -> Iterator[str]:
    """Whether the responses have other tokens than the entry counts."""
    if "response_length" in lengths:
        tokens = _total(lengths["response_length"])
        if tokens != entry.tokens:
            yield f"has {tokens} response tokens, its entry says {entry.tokens}"


def _total(lengths: pa.ChunkedArray) -> int:
    """The sum of a column of lengths; a missing one counts as 0."""
    return sum(int(chunk.drop_null().to_numpy().sum(dtype="int64")) for chunk in lengths.chunks)


def seal_problems(
    entry: Entry, file: DataFile, unread: list[Column], lengths: Columns
) -> Iterator[str]:
    """Lists that were not decoded, of which the seal counts other values than the lengths do."""
    totals: dict[str, int] = {}
    for column in unread:
        by, seal = length_column(column.name), file.columns[column.name]
        if column.name == "reward_components":
            count = len(entry.settings.reward.weights)
            if seal.values != count * (file.rows - seal.nulls):
                yield (
                    f"column {column.name} has {seal.values} values, expected {count} of each of "
                    f"{file.rows - seal.nulls} samples, one for each of reward.weights"
                )
        if column.name in OWN_LENGTH:
            continue
        sharded = entry.parallel.context_size > 1 or "context_size" in file.columns
        if not column.is_list or by not in lengths or seal.nulls or sharded:
            continue
        if by not in totals:
            totals[by] = _total(lengths[by])
        if seal.values != totals[by]:
            yield (
                f"column {column.name} has {seal.values} values, expected {totals[by]}, the sum "
                f"of {by}"
            )

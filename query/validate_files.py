"""One data file against its entry: digests, statistics, lengths, counts, stored text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.datafile import OpenFile
from trajreplay.query.reading import read_opened
from trajreplay.query.scanning import WHOLE_LIMIT_BYTES, decoded_bytes
from trajreplay.schema.columns import Column, Table
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.lists import elements, list_place, non_finite
from trajreplay.schema.policy import TEXT_FIELDS, Redaction
from trajreplay.schema.shards import shard_lengths
from trajreplay.schema.store import Store
from trajreplay.schema.tables import TABLES, length_column

_LENGTHS = ("response_length", "total_length")
_IDS = ("sample_id", "source_attempt", "source_rollout_id")


Problem = tuple[str, str]  # what was checked, and what was found and expected


def check_file(store: Store, entry: Entry, file: DataFile) -> tuple[list[Problem], pa.Table]:
    """Read every column of a data file and say what is wrong with it.

    A capture of more than 64 MiB is read a column at a time.

    Returns:
        What is wrong, and the ids of its samples.

    Raises:
        DatasetError: The file is not what the entry says.
    """
    if file.table not in TABLES:
        raise DatasetError(f"{file.path} holds rows of a table {file.table!r}, which no lake has")
    table = TABLES[file.table]
    columns = [table[name] for name in file.columns if name in table]
    small = decoded_bytes(file, columns) <= WHOLE_LIMIT_BYTES
    lengths: dict[str, pa.ChunkedArray] = {}
    ids: dict[str, pa.ChunkedArray] = {}
    problems: list[Problem] = []
    for number, some in enumerate([columns] if small else [[one] for one in _ordered(columns)]):
        with OpenFile(store, file, table, [column.name for column in some]) as opened:
            if number == 0:
                problems += [("statistics", one) for one in _statistics_problems(opened, entry)]
            found = read_opened(opened, entry, some)
        lengths |= {name: found[name] for name in _LENGTHS if name in found.column_names}
        ids |= {name: found[name] for name in _IDS if name in found.column_names}
        problems += [("content", one) for one in _values_problems(entry, file, found, lengths)]
        problems += [("redaction", one) for one in _redaction_problems(entry, table, found)]
    problems += [("content", one) for one in _total_problems(entry, lengths)]
    return problems, pa.table(ids)


def _ordered(columns: list[Column]) -> list[Column]:
    """Lengths first, since the other columns are held against them."""
    return sorted(columns, key=lambda column: column.name not in _LENGTHS)


def _statistics_problems(opened: OpenFile, entry: Entry) -> list[str]:
    """What is wrong with the statistics in a footer: readers that trust them would hide rows."""
    problems = []
    metadata = opened.parquet.metadata
    keys = {column.name for column in opened.table.having("key")}
    for group in opened.row_groups:
        chunks = metadata.row_group(group)
        for index in range(metadata.num_columns):
            chunk = chunks.column(index)
            if not chunk.is_stats_set and not chunk.has_column_index:
                continue
            name = chunk.path_in_schema.partition(".")[0]
            if name not in keys:
                problems.append(f"column {name} has statistics, expected them on keys only")
            elif (wrong := _wrong_key_statistics(chunk.statistics, entry, name)) is not None:
                problems.append(f"column {name} has statistics of {wrong}, not of its entry's key")
    return list(dict.fromkeys(problems))


def _wrong_key_statistics(statistics: object, entry: Entry, name: str) -> str | None:
    if not getattr(statistics, "has_min_max", False) or not hasattr(entry.key, name):
        return None
    found = (statistics.min, statistics.max)  # type: ignore[attr-defined]
    value = getattr(entry.key, name)
    return None if found == (value, value) else f"{found[0]!r} to {found[1]!r}"


def _values_problems(
    entry: Entry, file: DataFile, found: pa.Table, lengths: dict[str, pa.ChunkedArray]
) -> Iterator[str]:
    table = TABLES[file.table]
    right: set[object] = set()  # columns made with the same offsets are looked at once
    for name in found.column_names:
        column, values = table[name], found[name]
        seal = file.columns[name]
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
        if not column.is_list or name == "weight_versions":
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


def _is_shard(
    entry: Entry, column: Column, values: pa.ChunkedArray, lengths: dict[str, pa.ChunkedArray]
) -> bool:
    """Whether a rank of a context-parallel group holds just its tokens of a column."""
    place = entry.parallel
    if place.context_size == 1 or not lengths.keys() >= set(_LENGTHS):
        return False
    held = shard_lengths(
        column.name,
        entry.settings.layout,
        place,
        lengths["total_length"].to_numpy(),
        lengths["response_length"].to_numpy(),
    )
    if held is None:
        return False
    found = pc.list_value_length(values)
    return not pc.any(pc.not_equal(found.cast(pa.int64()), pa.array(held))).as_py()


def _length_problems(
    column: Column, values: pa.ChunkedArray, lengths: dict[str, pa.ChunkedArray]
) -> Iterator[str]:
    expected = lengths.get(length_column(column.name))
    if expected is None:
        return
    differs = pc.fill_null(pc.not_equal(pc.list_value_length(values), expected), False)
    count = pc.sum(differs).as_py() or 0
    if count:
        row = pc.index(differs, True).as_py()
        yield (
            f"row {row}: {column.name} has {len(values[row])} values, expected "
            f"{length_column(column.name)} = {expected[row]} ({count} rows like it)"
        )


def _redaction_problems(entry: Entry, table: Table, found: pa.Table) -> Iterator[str]:
    """What the text columns store that the capture's redaction policy does not leave."""
    texts = [name for name in found.column_names if name in TEXT_FIELDS and name in table]
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


def _total_problems(entry: Entry, lengths: dict[str, pa.ChunkedArray]) -> Iterator[str]:
    if "response_length" in lengths:
        tokens = pc.sum(lengths["response_length"]).as_py() or 0
        if tokens != entry.tokens:
            yield f"has {tokens} response tokens, its entry says {entry.tokens}"


def duplicate_samples(captures: Iterable[tuple[Entry, pa.Table]]) -> list[str]:
    """Samples that a shard of one cohort holds twice.

    Args:
        captures: The owners of a capture set, each with the ids of its samples.
    """
    seen: dict[object, set[object]] = {}
    problems: list[str] = []
    for entry, ids in captures:
        before = seen.setdefault(entry.parallel.shard, set())
        mine = list(zip(*(ids[name].to_pylist() for name in ids.column_names), strict=True))
        distinct = set(mine)
        if len(distinct) != len(mine) or not before.isdisjoint(distinct):
            twice = [one for one, count in Counter(mine).items() if count > 1 or one in before]
            problems += [f"rank {entry.key.rank} holds sample {one[0]!r} twice" for one in twice]
        before |= distinct
    return problems

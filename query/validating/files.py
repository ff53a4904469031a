"""One data file against its entry: digests, statistics, lengths, counts, stored text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.files.datafile import OpenFile
from trajreplay.query.files.key_columns import KEY_NAMES, KnownKeys
from trajreplay.query.files.reading import by_name, read_opened
from trajreplay.query.files.scanning import WHOLE_LIMIT_BYTES, decoded_bytes
from trajreplay.query.validating.values import (
    LENGTHS,
    redaction_problems,
    seal_problems,
    total_problems,
    values_problems,
)
from trajreplay.schema.columns import Column
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.shards import PLACING
from trajreplay.schema.store import Store
from trajreplay.schema.tables import TABLES

_IDS = ("sample_id", "source_attempt", "source_rollout_id")
_FIRST = (*LENGTHS, *PLACING.values())
_LOOKED_INTO = frozenset({*KEY_NAMES, *_FIRST, *_IDS, "group_id", "loss_mask"})

Problem = tuple[str, str]  # what was checked, and what was found and expected


def check_file(
    store: Store, entry: Entry, file: DataFile, known: KnownKeys, *, deep: bool = False
) -> tuple[list[Problem], pa.Table]:
    """Verify every byte of a data file, look into it, and say what is wrong with it.

    Its bytes being those that were sealed, only keys, names, lengths, masks and text are decoded,
    and of the other columns the footer, the seals and the lengths are held against each other.
    `deep`, or a file without a digest of its bytes, has every column decoded and its digest made
    anew. A capture of more than 64 MiB is read a column at a time.

    Args:
        store: The lake.
        entry: The capture.
        file: Its file.
        known: Key columns that need not be decoded again; gets those of this file.
        deep: Whether everything is decoded.

    Returns:
        What is wrong, and the ids of its samples.

    Raises:
        DatasetError: The file is not what the entry says.
    """
    if file.table not in TABLES:
        raise DatasetError(f"{file.path} holds rows of a table {file.table!r}, which no lake has")
    table = TABLES[file.table]
    deep = deep or not file.digest  # without a digest of its bytes there are those of its columns
    columns = [table[name] for name in file.columns if name in table]
    read = [one for one in columns if deep or _is_looked_into(one)]
    unread = [] if deep else [one for one in columns if not _is_looked_into(one)]
    small = decoded_bytes(file, read) <= WHOLE_LIMIT_BYTES
    lengths: dict[str, pa.ChunkedArray] = {}
    ids: dict[str, pa.ChunkedArray] = {}
    problems: list[Problem] = []
    for number, some in enumerate([read] if small else [[one] for one in _ordered(read)]):
        names = [column.name for column in some]
        unseen = number == 0 and not known.is_whole(file)
        with OpenFile(store, file, table, names, every_byte=unseen) as opened:
            if unseen:
                known.add_whole(file)
            if number == 0:
                problems += [("statistics", one) for one in _statistics_problems(opened, entry)]
                opened.check_columns([column.name for column in unread])
            keys = [] if deep else known.of(opened, entry.key)
            left = [column for column in some if column.name not in keys]
            found = by_name(read_opened(opened, entry, left, verify=deep, short=False))
            known.add(opened, entry.key, found)
        lengths |= {name: found[name] for name in _FIRST if name in found}
        ids |= {name: found[name] for name in _IDS if name in found}
        problems += [("content", one) for one in values_problems(entry, file, found, lengths)]
        problems += [("redaction", one) for one in redaction_problems(entry, table, found)]
    problems += [("content", one) for one in total_problems(entry, lengths)]
    problems += [("content", one) for one in seal_problems(entry, file, unread, lengths)]
    return problems, pa.table(ids)


def _is_looked_into(column: Column) -> bool:
    return column.name in _LOOKED_INTO or column.is_text


def _ordered(columns: list[Column]) -> list[Column]:
    """What says how long lists are first, since the other columns are held against it."""
    return sorted(columns, key=lambda column: column.name not in _FIRST)


def _statistics_problems(opened: OpenFile, entry: Entry) -> list[str]:
    """What is wrong with the statistics in a footer: readers that trust them would hide rows."""
    problems = []
    for name in opened.footer.names:
        is_key = opened.table[name].role == "key"
        for chunk in opened.footer.chunks(name):
            if not chunk.is_stats_set and not chunk.has_column_index:
                continue
            if not is_key:
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


def duplicate_samples(captures: Iterable[tuple[Entry, pa.Table]]) -> list[str]:
    """Samples that a shard of one cohort holds twice.

    Args:
        captures: The owners of a capture set, each with the ids of its samples.
    """
    captures = list(captures)
    if _all_distinct(captures):
        return []
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


def _all_distinct(captures: list[tuple[Entry, pa.Table]]) -> bool:
    """Whether no name occurs twice in a shard, wherever its samples are from."""
    shards: dict[object, list[pa.ChunkedArray]] = {}
    for entry, ids in captures:
        shards.setdefault(entry.parallel.shard, []).append(ids["sample_id"])
    return all(
        len(pc.unique(names)) == len(names)
        for parts in shards.values()
        for names in [pa.chunked_array([chunk for part in parts for chunk in part.chunks])]
    )

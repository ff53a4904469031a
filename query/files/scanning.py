"""Many captures one after another, in bounded pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import pyarrow as pa

from trajreplay.query.files.datafile import OpenFile
from trajreplay.query.files.reading import by_name, declared_columns, finished_columns, read_columns
from trajreplay.schema.columns import Column, Table
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.store import Store

WHOLE_LIMIT_BYTES = 64 << 20
MAX_THREADS = 4
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def ahead(
    store: Store, work: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[_Result]:
    """Results of work on items, in order.

    Of a lake in a bucket a few items are worked on ahead, since each waits for the network. In a
    folder that gains nothing: threads that decode small columns wait for each other.

    Args:
        store: The lake that the work reads.
        work: What to do with an item.
        items: The items.
    """
    threads = MAX_THREADS if store.folder is None else 1
    items = iter(items)
    first = list(islice(items, 2))
    if threads < 2 or len(first) < 2:
        yield from map(work, (*first, *items))
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[_Result]] = deque(pool.submit(work, item) for item in first)
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def scan(
    store: Store, entries: Iterable[Entry], table: Table, columns: Sequence[str]
) -> Iterator[tuple[Entry, Iterator[pa.RecordBatch]]]:
    """Read columns of many captures, in their order.

    Small captures are decoded whole; a large one a row group at a time, when its turn comes. What
    is wrong with a file is raised when its batches are taken.

    Yields:
        Each capture with its batches.
    """

    def work(entry: Entry) -> tuple[Entry, list[pa.RecordBatch] | DatasetError | None]:
        if not _is_small(entry, table, columns):
            return entry, None
        try:
            return entry, read_columns(store, entry, table, columns).to_batches()
        except DatasetError as error:
            return entry, error

    for entry, found in ahead(store, work, entries):
        if isinstance(found, DatasetError):
            yield entry, _raising(found)
        elif found is None:
            yield entry, read_batches(store, entry, table, columns)
        else:
            yield entry, iter(found)


def _raising(error: DatasetError) -> Iterator[pa.RecordBatch]:
    yield from ()
    raise error


def read_batches(
    store: Store, entry: Entry, table: Table, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Read columns of one capture in bounded pieces, for a scan.

    A capture that takes no more than 64 MiB is read and its digests are verified as in
    `read_columns`; a larger one comes a row group at a time, without.

    Raises:
        SchemaError: A name is not declared.
        DatasetError: The file is not what the entry says.
    """
    file = entry.file(table.name)
    if file is None or _is_small(entry, table, columns):
        yield from read_columns(store, entry, table, columns).to_batches()
        return
    wanted = declared_columns(table, columns)
    there = [column for column in wanted if column.name in file.columns]
    with OpenFile(store, file, table, [column.name for column in there]) as opened:
        start = -file.first_row  # of the row group, among the rows of the capture
        for group in opened.row_groups:
            found = opened.read(range(group, group + 1))
            first, last = max(-start, 0), min(file.rows - start, found.num_rows)
            named = by_name(found.slice(first, last - first))
            yield from finished_columns(
                file, entry, wanted, named, last - first, start=start + first
            ).to_batches()
            start += found.num_rows


def _is_small(entry: Entry, table: Table, columns: Sequence[str]) -> bool:
    file = entry.file(table.name)
    if file is None:
        return True
    there = [table[name] for name in columns if name in file.columns]
    return decoded_bytes(file, there) <= WHOLE_LIMIT_BYTES


def decoded_bytes(file: DataFile, columns: Iterable[Column]) -> int:
    """What columns of a capture take in memory, as its entry counts their values."""
    seals = file.columns
    return sum([seals[column.name].values * column.value_bytes for column in columns])

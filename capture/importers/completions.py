"""The file of completions that TRL logs at one step, read within bounds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trajreplay.capture.importers.parquet_footer import (
    MAGIC,
    MAX_FOOTER_BYTES,
    check_pages,
    compressions,
)
from trajreplay.capture.importers.places import is_plain_file, opened
from trajreplay.schema.errors import DatasetError

NAMES = ("step", "prompt", "completion", "advantage")
_NAME = re.compile(r"completions_([0-9]{1,18})\.parquet")
_MAX_ROWS = 1 << 20
_MAX_TEXT_BYTES = 1 << 30  # of one column, or so many times the size of the file
_MAX_FACTOR = 64
# What pandas writes; others unpack to far more than they are.
_COMPRESSIONS = {"SNAPPY", "UNCOMPRESSED"}


def is_completions(path: Path) -> bool:
    """Whether a path is a Parquet file of that name with the columns that TRL always writes."""
    if not _NAME.fullmatch(path.name) or not is_plain_file(path):
        return False
    try:
        with opened(path) as file:
            if file.read(4) != MAGIC:
                return False
            try:
                return set(NAMES) <= set(pq.read_schema(file).names)
            except (pa.ArrowException, OSError, ValueError):
                return True  # damaged: refused where it is read, which says so
    except (DatasetError, OSError):
        return False


def is_damaged(path: Path) -> bool:
    """Whether a file does not begin as Parquet does."""
    try:
        with opened(path) as file:
            return file.read(4) != MAGIC
    except (DatasetError, OSError):
        return True


def family_of(path: Path) -> str | None:
    """What the names of the files have in common; None for any other name."""
    return "" if _NAME.fullmatch(path.name) else None


def after(path: Path) -> Iterator[Path]:
    """The files of such names in the folder of one that follow it, in their order."""
    names, places = _names(path.parent, path.parent.stat().st_mtime_ns)
    return (path.parent / name for name in islice(names, places[path.name] + 1, None))


def before(path: Path) -> Iterator[Path]:
    """Those that precede it, the last one first."""
    names, places = _names(path.parent, path.parent.stat().st_mtime_ns)
    return (path.parent / names[place] for place in range(places[path.name] - 1, -1, -1))


@lru_cache(maxsize=1)
def _names(folder: Path, _changed_ns: int) -> tuple[list[str], dict[str, int]]:
    """The files of such names in a folder, and the place of each: listed once for all of them."""
    found = [one for one in os.listdir(folder) if _NAME.fullmatch(one)]  # noqa: PTH208 - names
    names = sorted(found, key=lambda name: (step_of(Path(name)), name))
    return names, {name: place for place, name in enumerate(names)}


def repeats(path: Path, before: Path) -> bool:
    """Whether a file holds the rows of another under its own step.

    One generation lasts for several optimizer steps, and is written again at each.
    """
    try:
        for names in (["advantage"], None):
            mine, theirs = (read_table(one, names) for one in (path, before))
            if not _same(mine, theirs):
                return False
    except DatasetError:
        return False
    return True


def _same(one: pa.Table, other: pa.Table) -> bool:
    names = [name for name in one.column_names if name != "step"]
    if names != [name for name in other.column_names if name != "step"]:
        return False
    return all(values_of(one[name]) == values_of(other[name]) for name in names)


def read_table(path: Path, names: Sequence[str] | None = None) -> pa.Table:
    """Read columns of a file, all of them by default; text as dictionaries, anything but text and
    numbers as null.

    Raises:
        DatasetError: It is no Parquet file, damaged, or unpacks to far more than it is.
    """
    try:
        with opened(path) as file:
            found = sorted(compressions(file) - _COMPRESSIONS)
            if found:
                raise odd(path, f"is compressed as {found[0]}, expected SNAPPY, as TRL writes it")
            check_pages(file, _MAX_ROWS)
            schema = _opened(file).schema_arrow
            texts = [one.name for one in schema if _is_text(one.type)]
            parquet = _opened(file, texts)
            count = parquet.metadata.num_rows
            if not 0 <= count <= _MAX_ROWS:
                raise odd(path, f"has {count:,} rows, expected at most {_MAX_ROWS:,}")
            wanted = schema if names is None else [schema.field(name) for name in names]
            plain = [one.name for one in wanted if _is_plain(one.type)]
            table = parquet.read(plain, use_threads=False)
            table.validate(full=True)
            for name in set(plain) & set(texts):
                _check_text(path, name, table[name])
            for one in wanted:
                if not _is_plain(one.type):
                    table = table.append_column(one.name, pa.nulls(count))
            return table
    except KeyError as error:
        raise odd(path, f"has no column {error}") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise odd(path, f"cannot be read: {what}") from error


def _opened(file: BinaryIO, texts: Sequence[str] = ()) -> pq.ParquetFile:
    return pq.ParquetFile(
        file,
        read_dictionary=list(texts) or None,
        thrift_string_size_limit=MAX_FOOTER_BYTES,
        thrift_container_size_limit=MAX_FOOTER_BYTES,
    )


def _of_values(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    of = _of_values(kind)
    return bool(pa.types.is_string(of) or pa.types.is_large_string(of))


def _is_plain(kind: pa.DataType) -> bool:
    """Whether a value of a column takes few bytes, or is text: a list may hold any number."""
    return bool(pa.types.is_primitive(kind) or pa.types.is_null(kind)) or _is_text(kind)


def _check_text(path: Path, name: str, column: pa.ChunkedArray) -> None:
    """Refuse text that a few bytes repeat, once for each row, into more than any step has."""
    limit = max(_MAX_TEXT_BYTES, _MAX_FACTOR * path.stat().st_size)
    total = 0
    for chunk in column.chunks:
        lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
        total += pc.sum(lengths).as_py() or 0
    if total > limit:
        raise odd(path, f"{name} has {total:,} bytes of text, expected at most {limit:,}")


def values_of(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column; rows of the same text share it."""
    found: list[Any] = []
    for chunk in column.chunks:
        if isinstance(chunk, pa.DictionaryArray):
            texts = chunk.dictionary.to_pylist()
            places = chunk.indices.to_pylist()
            found += [None if place is None else texts[place] for place in places]
        else:
            found += chunk.to_pylist()
    return found


def step_of(path: Path) -> int:
    """The step that a file is named after."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def check_columns(path: Path, table: pa.Table, step: int) -> None:
    """Refuse a table that is not of one step, or whose text and advantages are none.

    Raises:
        DatasetError: It is so.
    """
    lacking = [one for one in NAMES if one not in table.column_names]
    if lacking:
        raise odd(path, f"has no column {lacking[0]}")
    if len(set(table.column_names)) != len(table.column_names):
        raise odd(path, "has two columns of one name")
    steps = table["step"].unique().to_pylist()
    if steps not in ([step], []):
        raise odd(path, f"holds steps {steps[:5]}, expected {step}, as it is named")
    for name in ("prompt", "completion"):
        kind = table.schema.field(name).type
        if not _is_text(kind):
            raise odd(path, f"{name} is {kind}, expected text")
        if table[name].null_count:
            raise odd(path, f"{name} is missing in {table[name].null_count} rows")
    kind = table.schema.field("advantage").type
    if not pa.types.is_floating(kind):
        raise odd(path, f"advantage is {_of_values(kind)}, expected numbers")


def is_reward(table: pa.Table, name: str) -> bool:
    """Whether a column may be of a reward function: TRL writes the user's own beside them."""
    return name not in NAMES and pa.types.is_float64(table.schema.field(name).type)


def odd(path: Path, what: str) -> DatasetError:
    """What to raise of a file that TRL did not write so."""
    return DatasetError(
        f"{path} {what}",
        hint="The file is not what was written: get it again from where it was logged.",
        path=str(path),
    )

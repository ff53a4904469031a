"""The file of completions that TRL logs at one step, read within bounds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.capture.importers.parquet_footer import MAGIC, MAX_FOOTER_BYTES, compressions
from trajreplay.capture.importers.places import is_plain_file, opened
from trajreplay.schema.errors import DatasetError

NAMES = ("step", "prompt", "completion", "advantage")
_NAME = re.compile(r"completions_([0-9]{1,18})\.parquet")
_MAX_ROWS = 1 << 20
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
    return all(one[name].to_pylist() == other[name].to_pylist() for name in names)


def read_table(path: Path, names: Sequence[str] | None = None) -> pa.Table:
    """Read columns of a file, all of them by default.

    Raises:
        DatasetError: It is no Parquet file, damaged, or unpacks to far more than it is.
    """
    try:
        with opened(path) as file:
            found = sorted(compressions(file) - _COMPRESSIONS)
            if found:
                raise odd(path, f"is compressed as {found[0]}, expected SNAPPY, as TRL writes it")
            parquet = pq.ParquetFile(
                file,
                read_dictionary=["prompt", "completion"],
                thrift_string_size_limit=MAX_FOOTER_BYTES,
                thrift_container_size_limit=MAX_FOOTER_BYTES,
            )
            count = parquet.metadata.num_rows
            if not 0 <= count <= _MAX_ROWS:
                raise odd(path, f"has {count:,} rows, expected at most {_MAX_ROWS:,}")
            table = parquet.read(names, use_threads=False)
            table.validate(full=True)
            return table
    except KeyError as error:
        raise odd(path, f"has no column {error}") from error
    except (pa.ArrowException, OSError, ValueError) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise odd(path, f"cannot be read: {what}") from error


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
        text = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(text) or pa.types.is_large_string(text)):
            raise odd(path, f"{name} is {kind}, expected text")
        if table[name].null_count:
            raise odd(path, f"{name} is missing in {table[name].null_count} rows")
    if not pa.types.is_floating(table.schema.field("advantage").type):
        raise odd(path, f"advantage is {table.schema.field('advantage').type}, expected numbers")


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

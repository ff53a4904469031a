"""Captures changed after the fact: with everything signed anew, or byte by byte with nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay import Lake
from trajreplay.schema import CaptureKey, Entry, Output
from trajreplay.schema.canonical import dump_signed
from trajreplay.schema.entry_codec import dump_entry, load_entry
from trajreplay.schema.filedigest import bytes_digest, footer_digest
from trajreplay.schema.layout import entry_path
from trajreplay.schema.tables import TABLES
from trajreplay.writer.parquet import seal_columns, write_table


@contextmanager
def copied(folder: Path) -> Iterator[Lake]:
    """A copy of a lake, to be spoilt."""
    with tempfile.TemporaryDirectory() as other:
        shutil.copytree(folder, Path(other) / "lake")
        yield Lake.open(Path(other) / "lake")


def entry_file(lake: Lake, key: CaptureKey) -> Path:
    """The file of a capture's manifest entry."""
    return Path(lake.path) / entry_path(key)


def read_entry(lake: Lake, key: CaptureKey) -> Entry:
    """A capture's entry as it is now."""
    return load_entry(entry_file(lake, key).read_bytes(), entry_path(key))


def data_file(lake: Lake, key: CaptureKey) -> Path:
    """The data file of a capture."""
    return Path(lake.path) / read_entry(lake, key).files[0].path


def change_entry(lake: Lake, key: CaptureKey, change: Callable[[Entry], Entry]) -> None:
    """Replace a capture's entry by another one, sealed."""
    entry_file(lake, key).write_bytes(dump_entry(change(read_entry(lake, key))))
    lake.refresh()


def change_json(lake: Lake, key: CaptureKey, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a capture's entry as JSON, and seal it; it need not be one that a writer can make."""
    tree = json.loads(entry_file(lake, key).read_bytes())
    del tree["~blake3"]
    change(tree)
    entry_file(lake, key).write_bytes(dump_signed(tree))
    lake.refresh()


def change_table(
    lake: Lake, key: CaptureKey, change: Callable[[pa.Table], pa.Table], *, number: int = 0
) -> None:
    """Rewrite a capture's data file, with digests, counts and seal that agree with it."""
    entry = read_entry(lake, key)
    file = entry.files[number]
    path = Path(lake.path) / file.path
    table = TABLES[file.table]
    data = change(pq.read_table(path, partitioning=None))
    schema = pa.schema([table[name].field for name in data.column_names])
    data = data.cast(schema)
    path.unlink()
    groups = (data.num_rows,)
    size, footer, digest = write_table(str(path), table, data, groups)
    dtypes = {name: str(seal.source_dtype) for name, seal in file.columns.items()}
    columns = seal_columns(data, {name: one for name, one in dtypes.items() if one != "None"})
    tokens = entry.tokens if number else int(np.sum(data["response_length"].to_numpy()))
    renewed = replace(
        file,
        bytes=size,
        footer=footer,
        digest=digest,
        row_groups=groups,
        rows=data.num_rows,
        columns=columns,
    )
    files = tuple(renewed if one is file else one for one in entry.files)
    change_entry(lake, key, lambda old: replace(old, files=files, tokens=tokens))


def sign_file(lake: Lake, key: CaptureKey) -> None:
    """Tell a capture's entry size and digests that its data file has now, and nothing else."""
    with data_file(lake, key).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        footer = footer_digest(file.fileno(), size)
        digest = bytes_digest(file.read())
    renewed = replace(read_entry(lake, key).files[0], bytes=size, footer=footer, digest=digest)
    change_entry(lake, key, lambda old: replace(old, files=(renewed,)))


def change_value(
    lake: Lake,
    key: CaptureKey,
    column: str,
    row: int,
    value: Callable[[Any], Any],
    token: int | None = None,
    *,
    number: int = 0,
) -> None:
    """Change one value of one row, or of one token of it, and sign everything anew."""

    def changed(data: pa.Table) -> pa.Table:
        rows = data[column].to_pylist()
        if token is None:
            rows[row] = value(rows[row])
        else:
            rows[row][token] = value(rows[row][token])
        index = data.column_names.index(column)
        return data.set_column(index, column, pa.array(rows, data.schema.field(column).type))

    change_table(lake, key, changed, number=number)


def change_output(
    lake: Lake, key: CaptureKey, field: str, value: Callable[[Output], Mapping[str, Any]]
) -> None:
    """Change what a capture recorded of a scalar, and sign its entry anew."""

    def changed(entry: Entry) -> Entry:
        outputs = tuple(
            replace(one, **value(one)) if one.field == field else one for one in entry.outputs
        )
        return replace(entry, outputs=outputs)

    change_entry(lake, key, changed)


def drop_columns(lake: Lake, key: CaptureKey, *names: str) -> None:
    """Take columns out of a capture, as if they had never been recorded."""
    change_table(lake, key, lambda data: data.drop_columns(list(names)))


def flip_bit(path: Path, position: int, bit: int) -> None:
    """Flip one bit of a file, and leave everything else as it is."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(bytes(data))

"""Captures as tests make them, and a reader that trusts nothing but the manifest."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay import Lake, RecomputeConfig, SampleRecord
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.entry import Entry
from trajreplay.schema.entry_codec import decode_all, load_entry
from trajreplay.schema.layout import DATA_ROOT, ENTRIES
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.tables import TABLES
from trajreplay.writer import CaptureBuilder
from trajreplay.writer.parquet import seal_columns


def start(lake: Lake, **options: Any) -> CaptureBuilder:
    """Start a capture of rank 0 alone, unless the options say otherwise."""
    usual: dict[str, Any] = {
        "run_id": "r",
        "rollout_id": 0,
        "rank": 0,
        "expected_ranks": [0],
        "settings": RecomputeConfig(),
        "stages": ["sample"],
    }
    return lake.capture(**usual | options)


def record(lake: Lake, *uses: Callable[[CaptureBuilder], object], **options: Any) -> Entry:
    """Make one capture by calling each of these with it, and commit it."""
    with start(lake, **options) as capture:
        for use in uses:
            use(capture)
    assert capture.entry is not None
    return capture.entry


def sample(index: int = 0, length: int = 2, **fields: Any) -> SampleRecord:
    """A sample of a given length, all of whose tokens count."""
    usual: dict[str, Any] = {
        "sample_id": f"s-{index}",
        "group_index": 0,
        "response_length": length,
        "total_length": length + 1,
        "loss_mask": [1] * length,
        "raw_reward": 1.0,
        "reward": 0.5,
    }
    return SampleRecord(**usual | fields)


def entries_of(lake: Lake) -> list[Entry]:
    """Every committed entry, fully decoded, in order of path."""
    store = LocalStore(lake.path)
    paths = sorted(one.path for one in store.list(ENTRIES))
    entries = [load_entry(store.read(path, MAX_BYTES), path) for path in paths]
    for entry in entries:
        decode_all(entry)
    return entries


def data_files(lake: Lake) -> set[str]:
    """Every file under `data/`, committed or not."""
    return {one.path for one in LocalStore(lake.path).list(DATA_ROOT)}


def read_rows(lake: Lake, entry: Entry) -> pa.Table:
    """The rows of a capture as pyarrow reads them from its file."""
    (file,) = entry.files
    return pq.ParquetFile(Path(lake.path) / file.path).read()


def verify(lake: Lake) -> list[Entry]:
    """Check that every capture is whole: entry, file, types, row groups and digests."""
    entries = entries_of(lake)
    for entry in entries:
        for file in entry.files:
            path = Path(lake.path) / file.path
            assert path.stat().st_size == file.bytes
            footer = pq.ParquetFile(path)
            groups = footer.metadata.num_row_groups
            sizes = [footer.metadata.row_group(i).num_rows for i in range(groups)]
            assert tuple(sizes) == file.row_groups
            rows = footer.read()
            declared = [TABLES[file.table].arrow.field(name) for name in rows.column_names]
            assert rows.schema.equals(pa.schema(declared))
            dtypes = {name: one.source_dtype or "" for name, one in file.columns.items()}
            found = seal_columns(rows, dtypes)
            assert {name: one.digest for name, one in found.items()} == {
                name: one.digest for name, one in file.columns.items()
            }
    return entries


def values_of(table: pa.Table, name: str) -> Sequence[Any]:
    """The innermost values of a list column, as one numpy array."""
    chunks: Sequence[Any] = table.column(name).combine_chunks().flatten().to_numpy()
    return chunks

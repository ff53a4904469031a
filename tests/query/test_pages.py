"""The short way to float lists: what it gives is what the ordinary way gives, or nothing."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from tests.helpers.mutate import data_file, read_entry, sign_file
from trajreplay import DatasetError, Lake
from trajreplay.query import read_columns
from trajreplay.query.files.datafile import OpenFile
from trajreplay.query.files.pages import proven_columns
from trajreplay.query.files.reading import by_name
from trajreplay.schema import CaptureKey
from trajreplay.schema.digest import column_digest
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.tables import ROLLOUTS

KEY = CaptureKey("r", 0, "rollout", 0, None, 0)
FLOATS = ("kl", "old_log_probs")


def _capture(folder: str | Path, bits: "list[np.ndarray[Any, Any]]") -> Lake:
    lake = Lake.create(Path(folder) / "lake")
    samples = [sample(index, len(one)) for index, one in enumerate(bits)]
    values = [one.astype(np.uint32).view(np.float32) for one in bits]
    record(
        lake,
        lambda capture: capture.samples(samples),
        lambda capture: capture.tensor("kl", values),
        lambda capture: capture.tensor("old_log_probs", values),
    )
    return lake


def _proven(lake: Lake) -> dict[str, pa.ChunkedArray]:
    file = read_entry(lake, KEY).file("rollouts")
    assert file is not None
    with OpenFile(LocalStore(lake.path), file, ROLLOUTS) as opened:
        lengths = by_name(opened.read(opened.row_groups, ["response_length", "total_length"]))
        return proven_columns(opened, FLOATS, lengths)


def _ordinary(lake: Lake) -> pa.Table:
    return read_columns(
        LocalStore(lake.path), read_entry(lake, KEY), ROLLOUTS, FLOATS, verify=False
    )


def _many(one: list[int]) -> "np.ndarray[Any, Any]":
    """So many values that the file is read as a whole."""
    return np.tile(np.array(one, np.uint64), 60)


BITS = st.lists(
    st.lists(st.integers(0, 2**32 - 1), max_size=40).map(_many),
    min_size=1,
    max_size=8,
).filter(lambda rows: sum(map(len, rows)) > 2000)


@given(BITS)
def test_every_bit_pattern_comes_as_in_the_ordinary_way(
    bits: "list[np.ndarray[Any, Any]]",
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = _capture(folder, bits)
        proven, ordinary = _proven(lake), _ordinary(lake)
        for name in FLOATS:
            expected = ordinary[name].combine_chunks()
            assert (
                proven[name]
                .combine_chunks()
                .values.view(pa.uint32())
                .equals(expected.flatten().view(pa.uint32()))
            )
            assert (
                proven[name]
                .combine_chunks()
                .offsets.equals(
                    pa.array(
                        np.concatenate([[0], np.cumsum([len(one) for one in bits])]), pa.int32()
                    )
                )
            )


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    rng = np.random.default_rng(0)
    return _capture(tmp_path, [rng.integers(0, 2**31, length) for length in [300] * 600])


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "lz4"},
        {"compression": "none"},
        {"compression": "lz4", "data_page_size": 4096},
    ],
)
def test_row_groups_pages_and_plain_codecs_make_no_difference(
    lake: Lake, options: dict[str, Any]
) -> None:
    _rewrite(lake, row_group_size=512, use_dictionary=False, **options)
    assert set(_proven(lake)) == set(FLOATS)


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "zstd", "use_dictionary": False},
        {"compression": "lz4", "use_dictionary": True},
        {"compression": "lz4", "use_dictionary": False, "data_page_version": "2.0"},
    ],
)
def test_what_is_not_plain_is_left_to_the_ordinary_way(lake: Lake, options: dict[str, Any]) -> None:
    _rewrite(lake, row_group_size=512, **options)
    assert not _proven(lake)
    entry = read_entry(lake, KEY)
    found = read_columns(LocalStore(lake.path), entry, ROLLOUTS, FLOATS)
    assert {name: column_digest(found[name]) for name in FLOATS} == {
        name: entry.files[0].columns[name].digest for name in FLOATS
    }


def test_every_damaged_byte_is_refused(lake: Lake) -> None:
    path, entry = data_file(lake, KEY), read_entry(lake, KEY)
    whole = path.read_bytes()
    chunk = pq.ParquetFile(path).metadata.row_group(0)
    leaf = next(i for i in range(chunk.num_columns) if "kl" in chunk.column(i).path_in_schema)
    start = chunk.column(leaf).data_page_offset
    for at in (*range(start, start + 40), start + 5000):
        broken = bytearray(whole)
        broken[at] ^= 0x10
        path.write_bytes(bytes(broken))
        with pytest.raises(DatasetError):
            read_columns(LocalStore(lake.path), entry, ROLLOUTS, FLOATS)


def _rewrite(lake: Lake, **options: Any) -> None:
    path = data_file(lake, KEY)
    table = pq.ParquetFile(path).read()
    pq.write_table(table, path, store_schema=False, write_statistics=False, **options)
    sign_file(lake, KEY)

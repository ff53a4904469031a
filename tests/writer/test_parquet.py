"""Data files: their encoding, their row groups, and no statistics that could hide a NaN."""

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import record, sample, verify
from trajreplay import Lake
from trajreplay.schema.entry import Entry
from trajreplay.schema.tables import STEPS
from trajreplay.writer import parquet
from trajreplay.writer.encode import encode_column


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def footer_of(lake: Lake, entry: Entry) -> Any:
    return pq.ParquetFile(Path(lake.path) / entry.files[0].path).metadata


def test_only_key_columns_have_statistics(lake: Lake) -> None:
    def use(capture: Any) -> None:
        capture.samples([sample(weight_versions=[(0, 1, 2)], prompt="x")])
        capture.tensor("log_probs", [[1.0, 2.0]])

    group = footer_of(lake, record(lake, use, redaction={"prompt": "hash"})).row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    with_statistics = {one.path_in_schema for one in chunks if one.is_stats_set}
    assert with_statistics == {"run_id", "attempt", "rollout_id", "rank", "row"}
    assert {one.compression for one in chunks} == {"LZ4"}


def test_floats_are_plain_and_ids_and_masks_are_dictionaries(lake: Lake) -> None:
    def use(capture: Any) -> None:
        capture.samples([sample(i, 4) for i in range(8)])
        capture.tensor("log_probs", np.zeros(32, np.float32))

    group = footer_of(lake, record(lake, use)).row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    coded = {one.path_in_schema for one in chunks if one.has_dictionary_page}
    assert {"run_id", "sample_id", "group_id", "loss_mask.list.element"} <= coded
    assert not {"log_probs.list.element", "reward", "raw_reward"} & coded


# K-088
def test_a_nan_is_found_by_a_filter_on_the_bare_file(lake: Lake) -> None:
    rewards = [0.5, float("nan"), 0.25]
    entry = record(lake, lambda c: c.samples([sample(i, reward=r) for i, r in enumerate(rewards)]))
    path = str(Path(lake.path) / entry.files[0].path)
    with duckdb.connect() as connection:
        found = connection.execute(
            "select list(row order by row) from read_parquet($1) where isnan(reward)", [path]
        )
        assert found.fetchall() == [([1],)]
        greatest = connection.execute("select max(reward) from read_parquet($1)", [path])
        assert np.isnan(greatest.fetchall()[0][0])


def test_row_groups_hold_at_most_512_samples(lake: Lake) -> None:
    entry = record(lake, lambda c: c.samples([sample(i, 0) for i in range(1030)]))
    assert entry.files[0].row_groups == (512, 512, 6)
    assert verify(lake)[0].rows == 1030


def test_row_groups_are_bounded_in_bytes_and_cut_between_samples(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 40)
    lengths = [4, 6, 1, 30, 5, 5, 0, 0, 1]  # 10 floats are 40 bytes

    def use(capture: Any) -> None:
        capture.samples([sample(i, n) for i, n in enumerate(lengths)])
        capture.tensor("log_probs", np.arange(sum(lengths), dtype=np.float32))

    entry = record(lake, use)
    # the sample of 30 floats has a group of its own; loss_mask alone would never be cut
    assert entry.files[0].row_groups == (2, 1, 1, 4, 1)
    verify(lake)


def test_text_counts_towards_the_bytes(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 100)
    texts = ["x" * 60, "y" * 60, None, "z"]
    records = [sample(i, 0, label=text) for i, text in enumerate(texts)]
    entry = record(lake, lambda c: c.samples(records), redaction={"label": "truncate:99"})
    assert entry.files[0].row_groups == (1, 3)
    verify(lake)


# K-092
def test_a_column_of_more_elements_than_32_bits_is_planned_without_overflow() -> None:
    column = encode_column(STEPS["loss_mask"], [[1]])
    rows = 3000
    column = type(column)(
        column.column, column.values, np.full(rows, 2**20), column.valid, column.source_dtype
    )
    stops = parquet._row_groups([column], rows)
    sizes = np.diff([0, *stops])
    assert column.offsets[-1] > 2**31
    assert set(sizes.tolist()) == {32, rows % 32}
    assert stops[-1] == rows


def test_bytes_a_token_stay_under_24(lake: Lake) -> None:
    rng = np.random.default_rng(0)
    length, count = 512, 32
    names = ["rollout_log_probs", "old_log_probs", "log_probs", "ref_log_probs", "entropy"]

    def use(capture: Any) -> None:
        capture.samples([sample(i, length) for i in range(count)])
        for name in names:
            capture.tensor(name, rng.normal(size=length * count).astype(np.float32))
        advantages = rng.normal(size=count).astype(np.float32)
        capture.tensor("advantages", np.repeat(advantages, length))

    entry = record(lake, use, step_id=0)
    assert entry.files[0].bytes / entry.tokens < 24


def test_the_seal_is_of_what_is_read_back() -> None:
    values = pa.chunked_array([[[1.0], None], [[float("nan"), 2.0]]], STEPS["log_probs"].type)
    seal = parquet.seal_column(values, "float32")
    assert (seal.values, seal.nulls, seal.non_finite) == (3, 1, 1)
    assert parquet.seal_column(pa.chunked_array([["a", None]]), None).non_finite is None


@given(
    st.lists(st.lists(st.floats(width=32), max_size=4)),
    st.booleans(),
    st.integers(1, 3),
)
def test_lists_are_sealed_from_what_they_are_laid_out_from_as_from_arrow(
    rows: list[list[float]], some_null: bool, group: int
) -> None:
    given_rows = [None if some_null and not row else row for row in rows]
    columns = {"log_probs": encode_column(STEPS["log_probs"], given_rows)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "ROW_GROUP_ROWS", group)
        table, _ = parquet.build_table(STEPS, columns, len(rows))
    held = {"log_probs": "float32"}
    assert parquet.seal_columns(table, held, columns) == parquet.seal_columns(table, held)

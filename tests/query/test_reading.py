import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.captures import record, sample
from tests.helpers.mutate import change_entry, data_file, read_entry, sign_file
from tests.helpers.queried import write_capture
from trajreplay import DatasetError, Lake, SchemaError
from trajreplay.query import read_columns
from trajreplay.query.files.scanning import read_batches
from trajreplay.schema import CaptureKey, Entry
from trajreplay.schema.digest import column_digest
from trajreplay.schema.entry import ColumnSeal, DataFile
from trajreplay.schema.filedigest import footer_digest
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.tables import ROLLOUTS, STEPS

KEY = CaptureKey("r", 0, "rollout", 0, None, 0)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def read(lake: Lake, *columns: str, verify: bool = True) -> pa.Table:
    return read_columns(
        LocalStore(lake.path), read_entry(lake, KEY), ROLLOUTS, columns, verify=verify
    )


def rewrite(lake: Lake, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    """Rewrite the data file of KEY; of its entry, size and footer are signed anew."""
    path = data_file(lake, KEY)
    table = change(pq.ParquetFile(path).read())
    pq.write_table(table, path, **{"store_schema": False, "write_statistics": False} | options)
    sign_file(lake, KEY)


def with_column(name: str, values: pa.Array) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        return table.set_column(table.column_names.index(name), name, values)

    return change


def test_columns_come_in_the_order_asked_for_with_declared_types(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    table = read(lake, "reward", "log_probs", "run_id", "row", "sample_id")
    assert table.schema.equals(pa.schema([ROLLOUTS[name].field for name in table.column_names]))
    assert table["reward"].to_pylist() == [0.0, 1.0]
    assert table["log_probs"].to_pylist() == [[0.0] * 2, [-0.125] * 3]
    assert table["run_id"].to_pylist() == ["r", "r"]
    assert table["row"].to_pylist() == [0, 1]


def test_a_column_that_the_capture_lacks_is_all_null(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    table = read(lake, "entropy", "prompt", "weight_versions")
    assert table.to_pylist() == [{"entropy": None, "prompt": None, "weight_versions": None}] * 2
    assert table.schema.field("entropy").type == ROLLOUTS["entropy"].type


def test_a_capture_without_rows_reads_as_none(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0, size=0)
    table = read(lake, "sample_id", "log_probs", "reward")
    assert table.num_rows == 0
    assert table.schema.field("log_probs").type == ROLLOUTS["log_probs"].type


def test_an_undeclared_column_is_a_mistake_of_the_caller(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    with pytest.raises(SchemaError, match="rollouts has no column 'nope'"):
        read(lake, "nope")


def test_lists_are_read_without_a_copy_of_their_values(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    chunk = read(lake, "log_probs")["log_probs"].chunk(0)
    assert chunk.values.null_count == 0
    assert chunk.values.buffers()[1].size >= 5 * 4


def test_nested_and_text_columns_come_back(lake: Lake) -> None:
    spans = [(0, 1, 7), (1, 2, 8)]
    record(
        lake,
        lambda capture: capture.samples(
            [sample(0, weight_versions=spans, prompt="ü" * 9), sample(1, prompt=None)]
        ),
        redaction={"prompt": "truncate:3"},
    )
    table = read(lake, "weight_versions", "prompt")
    assert table["prompt"].to_pylist() == ["üüü", None]
    assert [tuple(one.values()) for one in table["weight_versions"][0].as_py()] == spans


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_a_flipped_bit_in_a_column_that_is_read_is_refused(lake: Lake, where: float) -> None:
    values = [[float(index + token) for token in range(400)] for index in range(4)]
    record(
        lake,
        lambda capture: capture.samples([sample(index, length=400) for index in range(4)]),
        lambda capture: capture.tensor("log_probs", values),
    )
    path = data_file(lake, KEY)
    chunk = pq.ParquetFile(path).metadata.row_group(0)
    index = next(
        at for at in range(chunk.num_columns) if chunk.column(at).path_in_schema[:9] == "log_probs"
    )
    start, size = chunk.column(index).data_page_offset, chunk.column(index).total_compressed_size
    data = bytearray(path.read_bytes())
    data[start + int(size * where)] ^= 4
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=f"{path.name}") as caught:
        read(lake, "log_probs")
    assert "trajreplay validate" in caught.value.hint


@pytest.mark.parametrize("cut", [1, 8, 100, 10**9])
def test_a_truncated_file_is_refused(lake: Lake, cut: int) -> None:
    write_capture(lake, 0, rollout_id=0)
    path = data_file(lake, KEY)
    path.write_bytes(path.read_bytes()[:-cut] if cut < path.stat().st_size else b"")
    with pytest.raises(DatasetError, match=r"bytes, expected \d+"):
        read(lake, "reward")
    sign_file(lake, KEY)
    with pytest.raises(DatasetError, match="footer of a Parquet file"):
        read(lake, "reward")


def test_garbage_with_a_footer_that_claims_too_much_is_refused(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    for length in (0, 5, 2**31, 2**32 - 1):
        content = b"PAR1" + b"\xff" * 64 + length.to_bytes(4, "little") + b"PAR1"
        data_file(lake, KEY).write_bytes(content)
        sign_file(lake, KEY)
        with pytest.raises(DatasetError, match="footer"):
            read(lake, "reward")


def test_a_missing_file_a_link_a_folder_and_a_pipe_are_refused(lake: Lake, tmp_path: Path) -> None:
    write_capture(lake, 0, rollout_id=0)
    path = data_file(lake, KEY)
    outside = tmp_path / "outside.parquet"
    path.rename(outside)
    with pytest.raises(DatasetError, match="is missing"):
        read(lake, "reward")
    path.symlink_to(outside)
    with pytest.raises(DatasetError, match="is a link, expected a regular file"):
        read(lake, "reward")
    path.unlink()
    path.mkdir()
    with pytest.raises(DatasetError, match="is a folder, expected a regular file"):
        read(lake, "reward")
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(DatasetError, match="is a pipe, expected a regular file"):
        read(lake, "reward")


def test_a_folder_above_the_file_that_is_a_link_is_refused(lake: Lake, tmp_path: Path) -> None:
    write_capture(lake, 0, rollout_id=0)
    folder = data_file(lake, KEY).parent
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DatasetError, match="is a link, expected a folder"):
        read(lake, "reward")


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "data/../../x", "data//x"])
def test_a_path_that_leaves_the_lake_is_refused(lake: Lake, path: str) -> None:
    write_capture(lake, 0, rollout_id=0)
    change_entry(lake, KEY, lambda old: replace(old, files=(replace(old.files[0], path=path),)))
    with pytest.raises(DatasetError, match="leaves the lake"):
        read(lake, "reward")


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("reward", pa.array([0, 1], pa.int64()), "type int64, expected double"),
        ("reward", pa.array([0.0, 1.0], pa.float32()), "type float, expected double"),
        ("reward", pa.array(["0", "1"]), "type string, expected double"),
        ("response_length", pa.array(["2", "3"]), "type string, expected int32"),
        ("log_probs", pa.array([[1.0], [2.0]], pa.list_(pa.float64())), "type list<"),
        ("log_probs", pa.array([1.0, 2.0], pa.float32()), "type float, expected list"),
        ("loss_mask", pa.array([[1], [1]], pa.list_(pa.int32())), "type list<"),
    ],
)
def test_a_column_of_another_type_is_refused_before_it_is_read(
    lake: Lake, column: str, values: pa.Array, message: str
) -> None:
    write_capture(lake, 0, rollout_id=0)
    rewrite(lake, with_column(column, values))
    with pytest.raises(DatasetError, match=f"column {column} is of {message}"):
        read(lake, "sample_id")


def test_null_elements_and_null_rows_are_refused(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    nullable = pa.array([[0.0, None], [-0.125] * 3], pa.list_(pa.float32()))
    rewrite(lake, with_column("log_probs", nullable))
    with pytest.raises(DatasetError, match="column log_probs has null elements"):
        read(lake, "log_probs", verify=False)
    rewrite(lake, with_column("response_length", pa.array([2, None], pa.int32())))
    with pytest.raises(DatasetError, match="response_length has 1 nulls, expected none"):
        read(lake, "response_length", verify=False)


def test_columns_beyond_or_short_of_the_entrys_are_refused(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    rewrite(lake, lambda table: table.append_column("kl", table["log_probs"]))
    with pytest.raises(DatasetError, match="columns that its entry lists: kl"):
        read(lake, "reward")
    rewrite(lake, lambda table: table.drop_columns(["kl", "reward"]))
    with pytest.raises(DatasetError, match="reward"):
        read(lake, "sample_id")
    with pytest.raises(DatasetError, match="reward"):
        read(lake, "reward")


def test_an_undeclared_column_of_file_and_entry_is_refused(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    rewrite(lake, lambda table: table.append_column("extra", pa.array([1, 2])))
    seal = ColumnSeal(column_digest(pa.array([1, 2])), 2)

    def admit(entry: Entry) -> Entry:
        file = entry.files[0]
        return replace(entry, files=(replace(file, columns=dict(file.columns) | {"extra": seal}),))

    change_entry(lake, KEY, admit)
    with pytest.raises(DatasetError, match="column 'extra', which no rollouts row has"):
        read(lake, "reward")


def test_swapped_columns_of_equal_type_are_refused(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    rewrite(lake, lambda table: with_column("raw_reward", table["reward"].combine_chunks())(table))
    with pytest.raises(DatasetError, match="column raw_reward has the digest"):
        read(lake, "raw_reward")


@pytest.mark.parametrize("rows", [1, 3])
def test_more_or_fewer_rows_than_the_entry_says_are_refused(lake: Lake, rows: int) -> None:
    write_capture(lake, 0, rollout_id=0, size=2)
    rewrite(lake, lambda table: pa.concat_tables([table, table]).slice(0, rows))
    with pytest.raises(DatasetError, match=rf"row groups of \[{rows}\] rows, expected \[2\]"):
        read(lake, "reward")


def test_a_file_that_claims_to_be_small_and_is_not_is_refused_by_its_counts(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    huge = pa.array([[0.0] * 2_000_000, [0.0]], ROLLOUTS["log_probs"].type)
    rewrite(lake, with_column("log_probs", huge), compression="zstd")
    assert data_file(lake, KEY).stat().st_size < 100_000
    with pytest.raises(
        DatasetError, match="log_probs has 2000001 values in its footer, expected 5"
    ):
        read(lake, "log_probs", verify=False)


def test_text_that_decodes_to_too_much_is_refused(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(
        lake,
        lambda capture: capture.samples([sample(i, prompt="x" * 1000) for i in range(50)]),
        redaction={"prompt": "truncate:1000"},
    )
    monkeypatch.setattr("trajreplay.query.files.reading.TEXT_LIMIT_BYTES", 40_000)
    with pytest.raises(DatasetError, match="prompt decodes to 50000 bytes of text"):
        read(lake, "prompt")
    monkeypatch.setattr("trajreplay.query.files.reading.TEXT_LIMIT_BYTES", 50_000)
    assert read(lake, "prompt").num_rows == 50


@pytest.mark.parametrize(
    ("column", "value"), [("run_id", "other"), ("rollout_id", 7), ("rank", 1), ("row", 5)]
)
def test_a_key_column_of_another_capture_is_refused(lake: Lake, column: str, value: Any) -> None:
    write_capture(lake, 0, rollout_id=0)
    forged = pa.array([value, value], ROLLOUTS[column].type)
    rewrite(lake, with_column(column, forged))
    with pytest.raises(DatasetError, match=f"column {column} is not that of its entry"):
        read(lake, column, verify=False)


def test_without_verification_changed_values_of_the_right_shape_pass(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    rewrite(lake, with_column("reward", pa.array([5.0, 6.0])))
    assert read(lake, "reward", verify=False)["reward"].to_pylist() == [5.0, 6.0]
    with pytest.raises(DatasetError, match="column reward has the digest"):
        read(lake, "reward")


def shared_file(tmp_path: Path) -> tuple[LocalStore, list[Entry], pa.Table]:
    """Two captures in one file of two row groups each, and one inside a row group."""
    rows = 8
    lists = pa.array([[float(i)] * i for i in range(rows)], ROLLOUTS["log_probs"].type)
    ids = pa.array([f"s-{i}" for i in range(rows)])
    table = pa.table(
        [ids, lists], schema=pa.schema([STEPS["sample_id"].field, STEPS["log_probs"].field])
    )
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=2, store_schema=False)
    entries = []
    for rank, (group, groups, first, count) in enumerate(
        [(0, (2, 2), 0, 4), (2, (2, 2), 0, 4), (1, (2, 2), 1, 2)]
    ):
        start = group * 2 + first
        part = table.slice(start, count)
        seals = {
            name: ColumnSeal(column_digest(part[name]), _values(part[name]))
            for name in table.column_names
        }
        with (tmp_path / "f.parquet").open("rb") as data:
            size = os.fstat(data.fileno()).st_size
            footer = footer_digest(data.fileno(), size)
        file = DataFile("steps", "f.parquet", size, footer, "", group, groups, first, count, seals)
        entries.append(Entry(CaptureKey("r", 0, "step", 0, 0, rank), (0, 1, 2), files=(file,)))
    return LocalStore(tmp_path), entries, table


def _values(column: pa.ChunkedArray) -> int:
    nested = pa.types.is_list(column.type)
    return len(column.combine_chunks().flatten()) if nested else len(column)


def test_captures_that_share_a_file_are_read_by_row_group_and_row(tmp_path: Path) -> None:
    store, entries, table = shared_file(tmp_path)
    for entry, start, count in zip(entries, (0, 4, 3), (4, 4, 2), strict=True):
        found = read_columns(store, entry, STEPS, ["sample_id", "log_probs"])
        assert found["sample_id"].to_pylist() == table["sample_id"].to_pylist()[start:][:count]
        assert found["log_probs"].to_pylist() == table["log_probs"].to_pylist()[start:][:count]


def test_a_large_capture_comes_a_row_group_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, entries, _ = shared_file(tmp_path)
    whole = [
        list(read_batches(store, entry, STEPS, ["sample_id", "log_probs"])) for entry in entries
    ]
    monkeypatch.setattr("trajreplay.query.files.scanning.WHOLE_LIMIT_BYTES", 0)
    for entry, expected in zip(entries, whole, strict=True):
        pieces = list(read_batches(store, entry, STEPS, ["sample_id", "log_probs"]))
        assert len(pieces) == 2
        assert pa.Table.from_batches(pieces).equals(pa.Table.from_batches(expected))

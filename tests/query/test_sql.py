import math
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.captures import record, sample
from tests.helpers.mutate import data_file, entry_file, sign_file
from tests.helpers.queried import (
    catalog_of,
    opened_files,
    write_capture,
    write_rollout,
    write_step,
)
from trajreplay import DatasetError, Lake, ParallelCoordinates, QueryError
from trajreplay.query import run_sql
from trajreplay.query.tables.errors import TABLE_NAMES
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.tables import TABLES


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Rollouts 0 to 3 with a step each; read only."""
    lake = Lake.create(tmp_path_factory.mktemp("sql") / "lake")
    for rollout in range(4):
        write_rollout(lake, rollout)
        write_step(lake, rollout, 0)
    return lake


@pytest.fixture
def own(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def values(lake: Lake, text: str) -> list[object]:
    """The first column of a result."""
    return list(lake.sql(text).arrow().column(0).to_pylist())


def test_a_result_comes_as_arrow_polars_and_relation(lake: Lake) -> None:
    query = lake.sql("select rollout_id, sum(reward) as r from rollouts group by 1 order by 1")
    expected = [6.0, 406.0, 806.0, 1206.0]
    assert query.arrow()["r"].to_pylist() == expected
    assert query.polars()["r"].to_list() == expected
    with query.relation() as relation:
        assert [row[1] for row in relation.limit(2).fetchall()] == expected[:2]
    with query.stream() as (rows, visible):
        assert pa.Table.from_batches(list(rows))["r"].to_pylist() == expected
    assert visible.notes() == ()
    assert run_sql(catalog_of(lake), query.text).table.equals(query.arrow())


def test_every_table_has_its_declared_columns_and_can_be_read(lake: Lake) -> None:
    for name, table in TABLES.items():
        found = lake.sql(f"select * from {name}").arrow()
        assert tuple(found.column_names) == table.names, name
    assert lake.sql("show tables").arrow().column(0).to_pylist() == sorted(TABLE_NAMES)


def test_lists_and_text_have_64_bit_offsets(lake: Lake) -> None:
    table = lake.sql("select log_probs, sample_id from steps").arrow()
    assert pa.types.is_large_list(table.schema.field("log_probs").type)
    assert table.schema.field("log_probs").type.value_type == pa.float32()


def test_more_than_2_to_the_31_list_elements_in_a_result_do_not_overflow(lake: Lake) -> None:
    text = "select range(0, 70000)::int8[] as x from range(3) where false"
    assert pa.types.is_large_list(lake.sql(text).arrow().schema.field("x").type)


def test_a_query_of_one_rollout_opens_its_files_only(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.sql("select 1").arrow()
    for text, count in [
        ("select sum(reward) from steps where rollout_id = 2", 2),
        ("select sum(reward) from steps where rollout_id = 2 and rank = 1", 1),
        ("select sum(reward) from steps where rollout_id in (1, 3)", 4),
        ("select sum(reward) from steps where rollout_id between 1 and 2 and run_id = 'r'", 4),
        ("select sum(reward) from steps where rollout_id = 2 and reward is not null", 2),
        ("select sum(reward) from steps where rollout_id = 2 and sample_id in ('s-0', 's-9')", 2),
        ("select sum(reward) from steps where step_id > 0", 0),
        ("select sum(reward) from steps where source_rollout_id = 2", 2),
        ("select sum(reward) from steps where source_rollout_id = 2 and rank = 0", 1),
        ("select sum(reward) from steps where source_rollout_id > 1 or reward < 0", 8),
        ("select sum(reward) from steps where run_id = 'other'", 0),
        ("select sum(reward) from rollouts where rollout_id = 3", 2),
        ("select count(*), max(rollout_id), min(row) from steps", 0),
        ("select rollout_id, rank from steps where row = 1", 0),
        ("select * from manifest", 0),
        ("select * from checksums", 0),
    ]:
        with opened_files(monkeypatch) as opened:
            lake.sql(text).arrow()
        assert len(opened) == count, text


def test_a_plain_list_of_thousands_of_files_is_never_made(lake: Lake) -> None:
    plan = lake.sql("select sum(reward) from steps").explain()
    assert ".parquet" not in plan


def test_keys_are_those_of_the_manifest(lake: Lake) -> None:
    found = lake.sql("select rollout_id, step_id, rank, row, sample_id from steps").arrow()
    assert found.num_rows == 16
    for row in found.to_pylist():
        assert row["sample_id"] == f"s-{row['rank'] * 2 + row['row']}"
        assert row["step_id"] == 0


@pytest.mark.parametrize(
    "text",
    [
        "select sample_id from rollouts where isnan(reward)",
        "select sample_id from rollouts where not isfinite(reward)",
        "select sample_id from rollouts where not (reward <= 0.6)",
        "select sample_id from rollouts where reward > 0.6",
        "select sample_id from rollouts where reward = 'nan'::double",
        "select sample_id from rollouts where reward >= 'nan'",
        "select sample_id from rollouts where reward not between -1 and 1",
        "select sample_id from rollouts where reward is not distinct from 'nan'::double",
        "select sample_id from rollouts where reward in ('nan'::double)",
        "select sample_id from rollouts order by reward desc limit 1",
        "select arg_max(sample_id, reward) from rollouts",
        "select sample_id from rollouts where reward = (select max(reward) from rollouts)",
        "select s from (select sample_id s, unnest(log_probs) u from rollouts) where isnan(u)",
        "select sample_id from rollouts where isnan(list_max(log_probs))",
        "select sample_id from rollouts where isnan(list_sum(log_probs))",
        "select sample_id from samples where isnan(reward)",
    ],
)
def test_a_nan_row_is_found_in_every_form(own: Lake, text: str) -> None:
    rewards = [0.5, math.nan, 0.25]
    record(
        own,
        lambda capture: capture.samples([sample(i, reward=rewards[i]) for i in range(3)]),
        lambda capture: capture.tensor("log_probs", [[x, -1.0] for x in rewards]),
    )
    assert values(own, text) == ["s-1"]


def test_counts_and_extrema_do_not_hide_a_nan(own: Lake) -> None:
    rewards = [0.5, math.nan, 0.25]
    record(own, lambda capture: capture.samples([sample(i, reward=rewards[i]) for i in range(3)]))
    (row,) = (
        own.sql(
            "select count(*) filter (where isnan(reward)) as n, bool_or(isnan(reward)) as some, "
            "sum(isnan(reward)::int) as s, max(reward) as high, min(reward) as low, "
            "avg(reward) as mean from rollouts"
        )
        .arrow()
        .to_pylist()
    )
    assert (row["n"], row["some"], row["s"], row["low"]) == (1, True, 1, 0.25)
    assert math.isnan(row["high"])
    assert math.isnan(row["mean"])
    assert values(own, "select reward from rollouts where reward <= 0.6") == [0.5, 0.25]
    found = own.sql("select non_finite from checksums where \"column\" = 'reward'").arrow()
    assert found.column(0).to_pylist() == [1]


def test_values_come_back_bit_for_bit(own: Lake) -> None:
    bits = [0x7FC00001, 0xFFC00000, 0x7FA00001, 0x80000000, 0x7F800000, 0x00000001, 0x3F800000]
    packed = pa.Array.from_buffers(
        pa.float32(), len(bits), [None, pa.py_buffer(struct.pack(f"<{len(bits)}I", *bits))]
    )
    record(
        own,
        lambda capture: capture.samples([sample(0, length=len(bits))]),
        lambda capture: capture.tensor("log_probs", packed),
    )
    found = own.sql("select log_probs from rollouts").arrow().column(0).combine_chunks().flatten()
    assert struct.unpack(f"<{len(bits)}I", found.buffers()[1].to_pybytes()[: 4 * len(bits)]) == (
        *bits,
    )


def test_the_first_file_does_not_decide_the_type(own: Lake) -> None:
    record(own, lambda capture: capture.samples([sample(0, reward=1)]), rollout_id=0)
    record(own, lambda capture: capture.samples([sample(0, reward=0.5)]), rollout_id=1)
    record(own, lambda capture: capture.samples([sample(0, reward=None)]), rollout_id=2)
    assert values(own, "select reward from rollouts order by rollout_id") == [1.0, 0.5, None]


def test_a_file_of_drifted_type_is_refused_rather_than_cast(own: Lake) -> None:
    (entry,) = write_rollout(own, 0, ranks=[0], expected_ranks=[0])
    path = data_file(own, entry.key)
    table = pq.ParquetFile(path).read()
    drifted = table.set_column(
        table.column_names.index("reward"), "reward", pa.array([0, 1], pa.int64())
    )
    pq.write_table(drifted, path, store_schema=False)
    sign_file(own, entry.key)
    with pytest.raises(DatasetError, match="column reward is of type int64, expected double"):
        own.sql("select sum(reward) from rollouts").arrow()


def test_sums_on_one_thread_are_the_same_every_time(lake: Lake) -> None:
    text = "select sum(x * 1e-3 + reward / 7) from (select unnest(log_probs) x, reward from steps)"
    found = {lake.sql(text, threads=1).arrow().column(0)[0].as_py() for _ in range(4)}
    assert len(found) == 1


def test_compensated_sums_do_not_depend_on_the_order(lake: Lake) -> None:
    text = (
        "select fsum(y), fsum(y order by y) from "
        "(select (random() - 0.5)::float as y from range(200000))"
    )
    (row,) = lake.sql(text).arrow().to_pylist()
    assert len({round(value, 9) for value in row.values()}) == 1


def test_only_complete_sets_of_the_lineage_are_shown_and_the_rest_is_told(own: Lake) -> None:
    for rollout in range(3):
        write_rollout(own, rollout)
    write_rollout(own, 1, attempt=1, resumed_from=(0, 1))
    write_rollout(own, 2, attempt=1, resumed_from=(0, 1), ranks=[1])
    result = run_sql(
        catalog_of(own), "select distinct attempt, rollout_id from rollouts order by all"
    )
    assert result.table.to_pylist() == [
        {"attempt": 0, "rollout_id": 0},
        {"attempt": 1, "rollout_id": 1},
    ]
    assert len(result.notes) == 2
    assert "1 capture set left out as incomplete" in result.notes[0]
    assert "no capture of rank 0" in result.notes[0]
    assert "2 capture sets of superseded attempts left out" in result.notes[1]
    count = "select count(*) from rollouts"
    assert values(own, count) == [8]
    assert own.sql(count, allow_partial=True).arrow().column(0).to_pylist() == [18]
    assert own.sql(count, attempt=0).arrow().column(0).to_pylist() == [12]
    assert values(own, "select count(*) from manifest") == [9]


def test_what_a_query_does_not_touch_is_not_told(own: Lake) -> None:
    write_rollout(own, 0)
    write_rollout(own, 1, ranks=[0])
    text = "select count(*) from rollouts where rollout_id = 0"
    assert run_sql(catalog_of(own), text).notes == ()


def test_one_run_can_be_shown_alone(own: Lake) -> None:
    write_rollout(own, 0)
    write_rollout(own, 0, run_id="other")
    text = "select distinct run_id from rollouts order by 1"
    assert values(own, text) == ["other", "r"]
    assert own.sql(text, run="other").arrow().column(0).to_pylist() == ["other"]
    with pytest.raises(QueryError, match="no run 'none'"):
        own.sql(text, run="none").arrow()


def test_parallel_copies_are_counted_once(own: Lake) -> None:
    for rank in (0, 1):
        record(
            own,
            lambda capture: capture.samples([sample(0)]),
            lambda capture: capture.expected("loss.policy", loss=1.0),
            rank=rank,
            expected_ranks=[0, 1],
            step_id=0,
            parallel=ParallelCoordinates(tensor_rank=rank, tensor_size=2),
        )
    assert values(own, "select count(*) from steps") == [1]
    assert values(own, "select count(*) from outputs") == [1]
    assert values(own, "select owner from manifest order by rank") == [True, False]


def test_samples_join_what_was_generated_to_what_consumed_it(own: Lake) -> None:
    write_rollout(own, 0)
    write_rollout(own, 1, size=1)
    write_step(own, 5, 2, ranks=[0], expected_ranks=[0], fields={"source_rollout_id": 0})
    rows = own.sql(
        "select sample_id, rollout_id, step_id, source_rollout_id, source_rank, reward "
        "from samples order by source_rollout_id, sample_id"
    ).arrow()
    assert [tuple(row.values()) for row in rows.to_pylist()] == [
        ("s-0", 5, 2, 0, 0, 500.0),
        ("s-1", 5, 2, 0, 0, 501.0),
        ("s-2", None, None, 0, 1, 2.0),
        ("s-3", None, None, 0, 1, 3.0),
        ("s-0", None, None, 1, 0, 100.0),
        ("s-1", None, None, 1, 1, 101.0),
    ]


def test_the_same_sample_id_of_two_rollouts_is_two_samples(own: Lake) -> None:
    write_rollout(own, 0, ranks=[0], expected_ranks=[0], size=1)
    write_rollout(own, 1, ranks=[0], expected_ranks=[0], size=1)
    both = [sample(0, source_rollout_id=0), sample(0, source_rollout_id=1)]
    record(own, lambda capture: capture.samples(both), rollout_id=1, step_id=0)
    text = "select source_rollout_id from samples where step_id = 0 order by 1"
    assert values(own, text) == [0, 1]


def test_outputs_say_what_they_mean(own: Lake) -> None:
    record(
        own,
        lambda capture: capture.samples([sample(0), sample(1)]),
        lambda capture: capture.expected("loss.policy", loss=2.5, scope="rank", reduction="sum"),
        lambda capture: capture.expected(
            "loss.policy", pg_loss=[0.5, float("inf")], scope="sample", reduction="sum"
        ),
        step_id=0,
    )
    rows = own.sql(
        "select field, scope, sample_id, row, value from outputs order by field, row"
    ).arrow()
    assert [tuple(row.values()) for row in rows.to_pylist()] == [
        ("loss", "rank", None, None, 2.5),
        ("pg_loss", "sample", "s-0", 0, 0.5),
        ("pg_loss", "sample", "s-1", 1, math.inf),
    ]
    assert values(own, "select count(*) from outputs where sample_id = 's-1'") == [1]


def test_a_damaged_file_ends_the_query_with_its_name(own: Lake) -> None:
    entries = write_rollout(own, 0)
    path = data_file(own, entries[1].key)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DatasetError, match=path.name):
        own.sql("select sum(reward) from rollouts").arrow()
    with (
        pytest.raises(DatasetError, match=path.name),
        own.sql("from rollouts").stream() as (rows, _),
    ):
        list(rows)
    assert values(own, "select sum(reward) from rollouts where rank = 0") == [1.0]


def test_a_damaged_entry_leaves_its_set_out_and_ends_a_query_of_the_manifest(own: Lake) -> None:
    write_rollout(own, 0)
    (entry, _) = write_rollout(own, 1)
    entry_file(own, entry.key).write_bytes(b"{}")
    result = run_sql(catalog_of(own), "select count(*) as n from rollouts")
    assert result.table["n"].to_pylist() == [4]
    assert "left out as incomplete" in result.notes[0]
    partial = run_sql(catalog_of(own), "select count(*) as n from rollouts", allow_partial=True)
    assert partial.table["n"].to_pylist() == [6]
    assert "rollout.-.0.data.json" in partial.notes[0]
    with pytest.raises(DatasetError, match="digest"):
        own.sql("select count(*) from manifest").arrow()


def test_a_scan_holds_one_capture_at_a_time(own: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    for rollout in range(6):
        write_rollout(own, rollout, ranks=[0], expected_ranks=[0])
    open_now: list[int] = []
    plain = LocalStore.open

    def counted(store: LocalStore, path: str) -> int:
        open_now.append(1)
        return plain(store, path)

    monkeypatch.setattr(LocalStore, "open", counted)
    with own.sql("select reward from rollouts").stream() as (rows, _):
        first = rows.read_next_batch()
        assert first.num_rows > 0


def test_another_tables_rows_do_not_appear(lake: Lake) -> None:
    assert values(lake, "select distinct kind from outputs") == []
    assert values(lake, "select distinct kind from manifest order by 1") == ["rollout", "step"]


@pytest.fixture
def many(tmp_path: Path) -> Lake:
    lake = Lake.create(tmp_path / "many")
    for rank in range(3):
        write_capture(lake, rank, rollout_id=0, expected_ranks=[0, 1, 2], size=600)
    return lake


def test_captures_of_several_row_groups_are_read_whole(many: Lake) -> None:
    assert values(many, "select count(*) from rollouts where reward >= 0") == [1800]
    assert values(many, "select max(row) from rollouts where sample_id = 's-1799'") == [599]

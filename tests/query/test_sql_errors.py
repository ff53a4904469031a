import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.queried import catalog_of, write_rollout, write_step
from trajreplay import DatasetError, Lake, QueryError
from trajreplay.query import SqlQuery
from trajreplay.schema.localstore import LocalStore


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = Lake.create(tmp_path_factory.mktemp("sql") / "lake")
    write_rollout(lake, 0)
    write_step(lake, 0, 0)
    return lake


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside.txt"
    path.write_text("top secret", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("selec 1", 'syntax error at or near "selec"'),
        ("select (1", "syntax error"),
        ("select 'abc", "unterminated"),
        ("", "no statement"),
        ("   \n", "no statement"),
        ("-- nothing", "no statement"),
        ("/* nothing */;", "no statement"),
        ("select 1; select 2", "2 statements"),
        ("select 1; drop view samples", "2 statements"),
        ("copy rollouts to 'OUT'", "COPY"),
        ("copy (select 1) to 'OUT' (format parquet)", "COPY"),
        ("attach 'OUT' as x", "ATTACH"),
        ("set threads = 1", "SET"),
        ("pragma database_list", "PRAGMA"),
        ("call pragma_version()", "CALL"),
        ("create table t as select 1", "CREATE"),
        ("create temp view t as select 1", "CREATE"),
        ("drop view samples", "DROP"),
        ("insert into rollouts values (1)", "INSERT"),
        ("update rollouts set reward = 0", "UPDATE"),
        ("delete from rollouts", "DELETE"),
        ("export database 'OUT'", "EXPORT"),
        ("load json", "LOAD"),
        ("install json", "LOAD"),
        ("begin", "TRANSACTION"),
        ("prepare p as select 1", "PREPARE"),
        ("vacuum", "VACUUM"),
        ("explain select 1", "EXPLAIN"),
        ("pivot rollouts on rank", "PIVOT without IN"),
        ("with x as (copy (select 1) to 'OUT') select 1", "COPY statement must be at the top"),
        ("with x as (insert into rollouts values (1) returning *) from x", "data-modifying"),
        ("with x as (update rollouts set reward = 0 returning *) from x", "data-modifying"),
        ("with x as (delete from rollouts returning *) select * from x", "data-modifying"),
        ("select * from read_csv('OUT')", "reads the tables of the lake only"),
        ("select * from read_text('OUT')", "reads the tables of the lake only"),
        ("select * from read_parquet('OUT')", "reads the tables of the lake only"),
        ("select * from read_json('OUT')", ""),
        ("select * from glob('/*')", "reads the tables of the lake only"),
        ("from sniff_csv('OUT')", "reads the tables of the lake only"),
        ("select * from 'OUT'", "no table"),
        ("select (select content from read_text('OUT'))", "reads the tables of the lake only"),
        ("select * from query('copy (select 1) to ''OUT''')", "single SELECT"),
        ("select * from nope", "no table 'nope', expected one of rollouts, steps"),
        ("select nope from steps", "no column 'nope' in steps, expected one of run_id"),
        ("select s.nope from steps s", "no column 'nope'"),
        ("select rewrad from rollouts", "did you mean reward"),
        ("select rewrad from rollouts", "no column 'rewrad' in rollouts; did you mean reward or"),
        ("select reward from (select rank from steps)", 'column "reward" not found'),
        ("select a from (select 1 as b)", "no column 'a' in any table"),
        ("select rollout_id, reward from rollouts group by 1", '"reward" must appear in the GROUP'),
        ("select rank from rollouts having reward > 1", '"reward" must appear in the GROUP BY'),
        ("select rank from steps group by 1 order by reward", '"reward" must appear in the GROUP'),
        ("select lenn(log_probs) from steps", "lenn"),
        ("select sample_id::int from steps", "Could not convert string 's-"),
        ("select getenv('HOME')", "getenv"),
        ("select \ud800", "valid text"),
    ],
)
def test_every_bad_statement_is_one_clear_query_error(
    lake: Lake, outside: Path, text: str, message: str
) -> None:
    before = outside.stat().st_mtime_ns
    with pytest.raises(QueryError) as caught:
        lake.sql(text.replace("OUT", str(outside))).arrow()
    assert message in str(caught.value)
    assert "query($1)" not in str(caught.value).lower()
    assert "Traceback" not in str(caught.value)
    assert "\t" not in caught.value.message
    assert len(caught.value.message.splitlines()) <= 6
    assert outside.read_text(encoding="utf-8") == "top secret"
    assert outside.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "text",
    [
        "select 1;",
        "select 1 -- the end",
        "values (1)",
        "from rollouts",
        "table rollouts",
        "describe rollouts",
        "summarize rollouts",
        "show tables",
        "with x as (select 1 as a) select * from x",
        "pivot (select rank, reward from rollouts) on rank in (0, 1) using sum(reward)",
        "select '; drop view samples' as a",
        "select $$ -- $$ as a",
    ],
)
def test_what_only_reads_is_run(lake: Lake, text: str) -> None:
    assert lake.sql(text).arrow().num_rows > 0


def test_a_refusal_says_what_to_do(lake: Lake) -> None:
    with pytest.raises(QueryError, match="--explain"):
        lake.sql("explain select 1").arrow()
    with pytest.raises(QueryError, match="IN \\('a', 'b'\\)"):
        lake.sql("pivot rollouts on rank").arrow()
    assert '"rank" = 0' in lake.sql("select * from rollouts where rank = 0").explain()


def test_of_many_candidates_the_nearest_are_shown(lake: Lake) -> None:
    with pytest.raises(QueryError) as caught:
        lake.sql("select round(sample_id, 2) from steps").arrow()
    lines = caught.value.message.splitlines()
    assert lines[0].startswith("Binder Error: No function matches the given name and argument")
    assert lines[1] == "Candidate functions:"
    assert all(line.startswith("  round(x ") for line in lines[2:5])
    assert lines[5:] == ["  and 13 more"]
    assert caught.value.hint == ""


@pytest.mark.parametrize(
    "expression",
    [
        "avg(log_probs)",
        "abs(log_probs)",
        "log_probs + 1",
        "-log_probs",
        "log_probs > 0",
        "sum(log_probs * log_probs)",
        "avg(unnest(log_probs))",
    ],
)
def test_a_list_that_is_taken_for_a_number_is_explained(lake: Lake, expression: str) -> None:
    with pytest.raises(QueryError) as caught:
        lake.sql(f"select {expression} from steps").arrow()
    assert caught.value.hint == (
        "Columns with a value for each token are lists: list_avg(log_probs) is the mean of each, "
        "and\nselect avg(x) from (select unnest(log_probs) as x from ...) that of all."
    )


def test_a_list_in_a_predicate_is_explained(lake: Lake) -> None:
    with pytest.raises(QueryError) as caught:
        lake.replay("log_probs > 0")
    assert caught.value.hint == (
        "Columns with a value for each token are lists: list_avg(log_probs) is the mean of each, "
        "list_max(log_probs) the largest."
    )


LATE = "select (i::varchar || if(i > 2500000, 'x', ''))::int from range(3000000) t(i)"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (LATE, "Conversion Error: Could not convert string '2500001x' to INT32", ""),
        (
            "select repeat('x', if(i > 2500000, 100000000, 1)) from range(3000000) t(i)",
            "Out of Memory Error: failed to allocate data of size",
            "Give it more memory: --memory 8GiB, or read less.",
        ),
    ],
)
def test_what_goes_wrong_after_the_first_rows_is_said_alike(
    lake: Lake, text: str, message: str, hint: str
) -> None:
    query = lake.sql(text, memory_bytes=50 << 20)
    with pytest.raises(QueryError) as caught, query.stream() as (rows, _):
        for _ in rows:
            pass
    assert caught.value.message.startswith(message)
    assert "SET " not in caught.value.message
    assert caught.value.hint == hint


def test_a_stream_that_takes_too_long_is_stopped(lake: Lake) -> None:
    query = SqlQuery(catalog_of(lake), "from range(100000000000)", time_limit_s=0.5)
    with (
        pytest.raises(QueryError, match="the statement took too long and was stopped"),
        query.stream() as (rows, _),
    ):
        for _ in rows:
            pass


FULL = """
import resource, sys
from trajreplay import Lake, QueryError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
text = "select i from (select i, random() as r from range(5000000) t(i) order by r)"
try:
    Lake.open(sys.argv[1]).sql(text, memory_bytes=25 << 20, threads=1).arrow()
except QueryError as error:
    print(error.message)
    print(error.hint)
"""


def test_temporary_files_without_room_are_said(lake: Lake, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, lake.path],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    message, *hint = done.stdout.splitlines()
    assert "File too large" in message
    assert str(tmp_path) in message
    assert hint == [
        "Set TMPDIR, where it puts what memory has no room for, to a folder with more.",
        "Give it more memory: --memory 8GiB, or read less.",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files", "/lake/x"), OSError(5, "Input/output error")]
)
def test_a_machine_that_fails_under_a_scan_is_said(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    opened = LocalStore.open

    def failing(store: LocalStore, path: str) -> int:
        if path.endswith(".parquet"):
            raise error
        return opened(store, path)

    monkeypatch.setattr(LocalStore, "open", failing)
    query = lake.sql("select reward from steps")
    with pytest.raises(DatasetError, match=f"cannot be read: {error.strerror}") as caught:
        query.arrow()
    assert caught.value.hint == "Once the machine lets it be read, run the statement again."
    with pytest.raises(DatasetError, match="cannot be read"), query.stream() as (rows, _):
        list(rows)
    with pytest.raises(DatasetError, match="cannot be read"), query.relation() as relation:
        relation.fetchall()


def test_an_error_of_what_is_done_with_rows_is_left_alone(lake: Lake, tmp_path: Path) -> None:
    query = lake.sql("from steps")
    with pytest.raises(FileNotFoundError), query.stream():
        (tmp_path / "mine").read_bytes()
    with pytest.raises(FileNotFoundError), query.relation():
        (tmp_path / "mine").read_bytes()


def test_python_variables_are_not_tables(lake: Lake) -> None:
    import pyarrow as pa

    mine = pa.table({"secret": [1]})
    assert mine.num_rows == 1
    with pytest.raises(QueryError, match="no table 'mine'"):
        lake.sql("select * from mine").arrow()


def test_the_configuration_cannot_be_changed_by_a_function(lake: Lake) -> None:
    for name, value in [("enable_external_access", False), ("lock_configuration", True)]:
        found = lake.sql(f"select current_setting('{name}')").arrow().column(0).to_pylist()
        assert found == [value]


def test_a_statement_that_takes_too_much_memory_says_so(lake: Lake) -> None:
    text = "select count(*) from (select distinct a, a * 7 as b from range(20000000) t(a))"
    with pytest.raises(QueryError, match="--memory"):
        lake.sql(text, memory_bytes=2 << 20).arrow()


def test_a_statement_that_takes_too_long_is_stopped(lake: Lake) -> None:
    from trajreplay.query import run_sql

    text = "select count(*) from range(100000000000) t(a) where a % 7 = 3"
    with pytest.raises(QueryError, match="took too long"):
        run_sql(catalog_of(lake), text, time_limit_s=0.05)

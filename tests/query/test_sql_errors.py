from pathlib import Path

import pytest

from tests.helpers.queried import write_rollout, write_step
from trajreplay import Lake, QueryError


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
    from tests.helpers.queried import catalog_of
    from trajreplay.query import run_sql

    text = "select count(*) from range(100000000000) t(a) where a % 7 = 3"
    with pytest.raises(QueryError, match="took too long"):
        run_sql(catalog_of(lake), text, time_limit_s=0.05)

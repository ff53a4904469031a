"""`trajreplay sql`: one SELECT from an argument, stdin or a file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.helpers.cli import Outcome, interrupted, run
from tests.helpers.small_lakes import faulty_lake, gappy_lake, rollout
from trajreplay import Lake

QUESTION = "select rollout_id, max(reward) as largest from rollouts group by 1 order by 1"
ANSWER = """\
rollout_id   largest
----------  --------
         0  0.707106
         1       5.5
         2  0.707106
"""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(faulty_lake(tmp_path_factory.mktemp("faulty") / "lake").path)


def sql(lake: Path, *args: str, stdin: str | bytes | None = None) -> Outcome:
    return run("sql", "--lake", lake, *args, stdin=stdin)


def test_a_statement_comes_from_an_argument_stdin_or_a_file(lake: Path, tmp_path: Path) -> None:
    told = Outcome(0, ANSWER, "")
    assert sql(lake, QUESTION) == told
    assert sql(lake, "-", stdin=QUESTION) == told
    (tmp_path / "question.sql").write_text(QUESTION)
    assert sql(lake, "-f", str(tmp_path / "question.sql")) == told
    assert sql(lake, "-f", "-", stdin=QUESTION) == told


def test_every_format_has_the_same_rows(lake: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in sql(lake, QUESTION, "--format", "ndjson").out.splitlines()]
    assert rows[1] == {"rollout_id": 1, "largest": 5.5}
    assert json.loads(sql(lake, QUESTION, "--format", "json").out) == rows
    assert sql(lake, QUESTION, "--format", "csv").out.splitlines()[2] == "1,5.5"
    assert sql(lake, QUESTION, "-o", str(tmp_path / "out.parquet")) == Outcome(0, "", "")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows


def test_non_finite_values_are_words(lake: Path) -> None:
    question = "select 'nan'::double as a, 'inf'::double as b, -'inf'::double as c, null as d"
    assert sql(lake, question, "--format", "ndjson").out == (
        '{"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": null}\n'
    )


FORMATS = ("table", "json", "ndjson", "csv", "parquet")
YEARS = "holds a date outside of years 1 to 9999, or parts of a microsecond"


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("date '290000-01-01'", YEARS),
        ("date '0044-03-15 (BC)'", YEARS),
        ("timestamp '290000-01-01'", YEARS),
        ("timestamp_ns '2020-01-01 00:00:00.123456789'", YEARS),
        ("time_ns '12:00:00.123456789'", YEARS),
        ("[{'a': date '290000-01-01'}]", YEARS),
        ("if(i < 2999, null, date '290000-01-01')", YEARS),
        ("'infinity'::date", "holds infinity"),
        ("340282366920938463463374607431768211455::uhugeint", "which Arrow does not have"),
    ],
)
def test_a_value_that_cannot_be_written_is_refused_by_column(
    lake: Path, tmp_path: Path, format_name: str, value: str, message: str
) -> None:
    statement = f"select {value} as x from range(3000) t(i)"
    outcome = sql(lake, statement, "--format", format_name, "-o", str(tmp_path / "out"))
    if format_name == "parquet" and message is YEARS:
        assert outcome == Outcome(0, "", "")
        return
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("Error: column x is of type ")
    assert message in outcome.err
    assert outcome.err.endswith("\nCast it to text in the statement: x::varchar\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", ["interval '1 day'", "union_value(a := 1)", "{}"])
def test_a_type_that_parquet_lacks_is_refused_by_column(
    lake: Path, tmp_path: Path, value: str
) -> None:
    target = tmp_path / "out.parquet"
    outcome = sql(lake, f"select 1 as fine, [{value}] as x", "-o", str(target))
    assert (outcome.code, outcome.out) == (2, "")
    assert "Error: column x is of type large_list<" in outcome.err
    assert "has no equal in Parquet\n\nCast it to text in the statement: x::varchar" in outcome.err
    assert not target.exists()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("interval '14 months -3 days 1500 ms'", "14 months -3 days 1.5 seconds"),
        ("interval '-5 us'", "-0.000005 seconds"),
        ("interval '0 days'", "0 seconds"),
        ("map {'a': 1}", [["a", 1]]),
        ("union_value(a := 'x')", "x"),
        ("'b'::enum('a', 'b')", "b"),
        ("{'a': [1, null]}", {"a": [1, None]}),
        ("99999999999999999999999999999999999999", 99999999999999999999999999999999999999),
        ("0.1::decimal(38, 37)", 0.1),
        ("'\\x00\\xff'::blob", "00ff"),
        ("timestamptz '2020-01-01 00:00:00+02'", "2019-12-31T22:00:00+00:00"),
        ("'7ac0a9a8-94d9-4b16-b2b4-3f7e1b5a1d11'::uuid", "7ac0a9a8-94d9-4b16-b2b4-3f7e1b5a1d11"),
        ("null", None),
    ],
)
def test_a_type_that_json_lacks_keeps_its_value(lake: Path, value: str, written: object) -> None:
    outcome = sql(lake, f"select {value} as x", "--format", "ndjson")
    assert json.loads(outcome.out) == {"x": written}


def test_an_interval_is_words_in_a_table(lake: Path) -> None:
    outcome = sql(lake, "select interval '1 day' as x, [interval '2 days'] as y")
    assert outcome.out.splitlines()[2] == "1 days  [2 days]"


def test_tensors_are_lists(lake: Path) -> None:
    outcome = sql(lake, "select loss_mask from rollouts limit 1", "--format", "ndjson")
    assert outcome.out == '{"loss_mask": [1, 1]}\n'


def test_the_plan_is_shown_on_request(lake: Path) -> None:
    outcome = sql(lake, "--explain", "select rank from rollouts where rollout_id = 1")
    assert (outcome.code, outcome.err) == (0, "")
    assert "rollout_id" in outcome.out


def test_what_the_tables_leave_out_is_said_on_stderr(tmp_path: Path) -> None:
    lake = Path(gappy_lake(tmp_path / "lake").path)
    count = "select count(*) as n from rollouts"
    outcome = sql(lake, count)
    assert (outcome.code, outcome.out) == (0, "n\n-\n2\n")
    assert outcome.err.startswith("1 capture set left out as incomplete, the first: run 'r'")
    assert sql(lake, count, "-q").err == ""
    assert sql(lake, count, "--allow-partial") == Outcome(0, "n\n-\n4\n", "")


def test_a_run_and_an_attempt_can_be_chosen(lake: Path) -> None:
    count = "select count(*) as n from rollouts"
    assert sql(lake, count, "--run", "r", "--attempt", "0").out == "n\n-\n6\n"
    assert sql(lake, count, "--run", "nope").code == 2


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("selct 1", "syntax error"),
        ("select nonsense from rollouts", "no column 'nonsense' in rollouts, expected one of"),
        ("select 1 from nonsense", "no table 'nonsense', expected one of rollouts, steps"),
        ("", "found no statement"),
        ("-- only a comment", "found no statement"),
        ("select 1; select 2", "found 2 statements"),
        ("select * from read_csv('/etc/passwd')", "Error: "),
        ("select * from '/etc/passwd'", "Error: "),
        ("select * from glob('/*')", "Error: "),
        ("copy rollouts to '/tmp/stolen.csv'", "COPY"),
        ("attach '/tmp/other.db'", "ATTACH"),
        ("set memory_limit = '1GB'", "SET"),
        ("drop table rollouts", "DROP"),
        ("explain select 1", "--explain"),
        ("with x as (copy rollouts to '/tmp/stolen.csv') select 1", "Error: "),
        ("with x as (insert into rollouts values (1) returning *) select * from x", "Error: "),
        ("with x as (update rollouts set reward = 0 returning *) select * from x", "Error: "),
        ("with x as (delete from rollouts returning *) select * from x", "Error: "),
    ],
)
def test_what_is_not_one_select_is_a_usage_error(lake: Path, statement: str, message: str) -> None:
    outcome = sql(lake, "--", statement)
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert not Path("/tmp/stolen.csv").exists()


@pytest.mark.parametrize("args", [(), ("select 1", "-f", "-")])
def test_exactly_one_statement_is_needed(lake: Path, args: tuple[str, ...]) -> None:
    outcome = sql(lake, *args)
    assert (outcome.code, outcome.out) == (2, "")
    assert "Give one of STATEMENT and --file" in outcome.err


def test_a_statement_that_is_no_text_is_a_usage_error(lake: Path, tmp_path: Path) -> None:
    outcome = sql(lake, "-", stdin=b"select '\xff'")
    assert (outcome.code, outcome.out) == (2, "")
    assert "no UTF-8 text" in outcome.err
    assert sql(lake, "-f", str(tmp_path / "missing.sql")).code == 2
    said = sql(lake, "select '\udcff'")
    assert (said.code, said.out) == (2, "")
    assert "is no valid text, expected UTF-8" in said.err
    assert sql(lake, "select 1", "--run", "\udcff").code == 2


def test_a_broken_file_under_a_statement_is_refused(tmp_path: Path) -> None:
    lake = Path(faulty_lake(tmp_path / "lake").path)
    file = min((lake / "data").rglob("*.parquet"))
    file.write_bytes(file.read_bytes()[:-1])
    target = tmp_path / "out.csv"
    outcome = sql(lake, "select reward from rollouts", "-o", str(target))
    assert (outcome.code, outcome.out) == (3, "")
    assert file.name in outcome.err
    assert not target.exists()


def test_names_from_a_lake_cannot_steer_the_terminal(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    rollout(lake, ids=("\u202e[red]x", "s-1"))
    path = Path(lake.path)
    outcome = sql(path, "select sample_id, chr(27) || '[2J' as e from rollouts limit 1")
    assert outcome.out.splitlines()[2] == "\\u202e[red]x  \\x1b[2J"
    quoted = sql(path, "select * from rollouts where chr(27) || 'x' = 1")
    assert quoted.code == 2
    assert "\x1b" not in quoted.err


def test_a_reader_that_goes_away_in_the_middle_is_no_error(lake: Path) -> None:
    statement = "select r.*, i from rollouts r, range(20000) t(i)"
    program = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "trajreplay",
            "sql",
            "--lake",
            lake,
            "--format",
            "ndjson",
            statement,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.read(10)
    program.stdout.close()
    assert program.stderr.read() == b""
    assert program.wait(60) == 141
    program.stderr.close()


def test_a_full_disk_is_said_as_such(lake: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "trajreplay", "sql", "--lake", str(lake), "select 1 as one"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 3
    assert done.stderr == (
        "Error: input or output: No space left on device\n"
        "\n"
        "Make room there, or write to another place.\n"
    )


@pytest.mark.parametrize(
    "statement",
    [
        "select count(*) from rollouts, range(100000000000) t(a) where a % 7 = 3",
        "select reward, a from rollouts, range(100000000000) t(a) where a % 100000000007 = 3",
        "select reward, random() as r from rollouts, range(100000000000) order by r",
        "select reward, a from rollouts, range(100000000000) t(a)",
    ],
)
@pytest.mark.parametrize("format_name", ["table", "parquet"])
def test_an_interrupt_ends_a_running_statement(
    lake: Path, tmp_path: Path, statement: str, format_name: str
) -> None:
    target = tmp_path / "out"
    outcome = interrupted(
        *("sql", "--lake", lake, "--format", format_name, "-o", target, statement), tmp=tmp_path
    )
    assert outcome == Outcome(130, "", "\nInterrupted.\n")
    assert list(tmp_path.iterdir()) == []

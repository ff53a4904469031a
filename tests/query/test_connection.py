import os
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import pytest

from tests.helpers.queried import catalog_of, write_rollout
from trajreplay import Lake
from trajreplay.query.connection import connect
from trajreplay.query.visible import Visible


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = Lake.create(tmp_path_factory.mktemp("connect") / "lake")
    write_rollout(lake, 0)
    return lake


@pytest.mark.parametrize(
    "statement",
    [
        "set enable_external_access = true",
        "set lock_configuration = false",
        "set memory_limit = '99GB'",
        "set temp_directory = '/tmp'",
        "set python_enable_replacements = true",
        "set allowed_directories = ['/']",
        "attach '/tmp/x.db' as x",
        "copy (select 1) to '/tmp/x.csv'",
        "copy rollouts to '/tmp/x.parquet'",
        "select * from read_text('/etc/hostname')",
        "install json",
        "load '/tmp/x.duckdb_extension'",
        "export database '/tmp/x'",
        "with x as (copy (select 1) to '/tmp/x.csv') select 1",
    ],
)
def test_even_a_statement_that_is_not_bound_reaches_no_file(lake: Lake, statement: str) -> None:
    with connect(Visible(catalog_of(lake))) as connection, pytest.raises(duckdb.Error):
        connection.execute(statement)
    assert not Path("/tmp/x.csv").exists()


def test_connections_do_not_see_each_other(lake: Lake, tmp_path: Path) -> None:
    other = Lake.create(tmp_path / "other")
    text = "select count(*) from rollouts"
    with connect(Visible(catalog_of(lake))) as one, connect(Visible(catalog_of(other))) as two:
        assert one.execute(text).fetchone() == (4,)
        assert two.execute(text).fetchone() == (0,)
        one.execute("create temp table mine as select 1")
        with pytest.raises(duckdb.CatalogException):
            two.execute("from mine")


def test_spill_goes_to_a_folder_of_its_own_outside_the_lake(lake: Lake) -> None:
    with connect(Visible(catalog_of(lake))) as connection:
        row = connection.execute("select current_setting('temp_directory')").fetchone()
    assert row is not None
    folder = Path(row[0])
    assert folder.is_dir()
    assert not folder.is_relative_to(lake.path)
    assert str(os.getpid()) in folder.name


def test_a_temporary_folder_inside_the_lake_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.create(tmp_path / "lake")
    inside = Path(lake.path) / "tmp"
    inside.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(inside))
    with connect(Visible(catalog_of(lake))) as connection:
        row = connection.execute("select current_setting('temp_directory')").fetchone()
    assert row is not None
    assert Path(row[0]).parent == tmp_path


PROGRAM = """
import sys, trajreplay
lake = trajreplay.Lake.open(sys.argv[1])
print(lake.sql("select count(*) from rollouts").arrow().column(0)[0])
query = lake.sql("select * from rollouts").stream()
rows, _ = query.__enter__()
rows.read_next_batch()
"""


def test_the_interpreter_exits_cleanly_with_a_query_left_open(lake: Lake, tmp_path: Path) -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, lake.path],
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")
    assert list(tmp_path.iterdir()) == []

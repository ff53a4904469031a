import os
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import pytest

from tests.helpers.queried import catalog_of, write_rollout
from trajreplay import Lake, QueryError
from trajreplay.query.tables.connection import connect
from trajreplay.query.tables.visible import Visible


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


def test_memory_that_no_machine_has_is_refused(lake: Lake) -> None:
    with pytest.raises(QueryError, match=r"no statement can run: .*too large") as caught:
        lake.sql("select 1", memory_bytes=10**30).arrow()
    assert "memory that a machine can have" in caught.value.hint


@pytest.mark.parametrize("threads", [0, -1, 10**9])
def test_threads_that_no_machine_has_are_refused(lake: Lake, threads: int) -> None:
    with pytest.raises(QueryError, match=f"found {threads} threads, expected 1 to 1024"):
        lake.sql("select 1", threads=threads).arrow()


@pytest.mark.parametrize("kind", ["gone", "a file", "closed"])
def test_a_temporary_folder_that_cannot_be_used_is_said(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "temporary"
    if kind == "a file":
        folder.write_text("")
    if kind == "closed":
        folder.mkdir()
        plain = os.mkdir

        def refusing(path: str, mode: int = 0o777) -> None:
            if str(path).startswith(str(folder)):
                raise PermissionError(13, "Permission denied", path)
            plain(path, mode)

        monkeypatch.setattr(os, "mkdir", refusing)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(QueryError) as caught:
        lake.sql("select 1", memory_bytes=3 << 20).arrow()
    assert "TMPDIR" in caught.value.hint


def test_a_temporary_folder_whose_name_is_no_text_is_said(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "\udcff"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(QueryError, match="expected a folder whose name is UTF-8"):
        lake.sql("select 1").arrow()


INTERRUPTED = """
import os, signal, sys, threading
from trajreplay import Lake
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
lake = Lake.open(sys.argv[1])
lake.sql("select 1").arrow()  # libraries that are loading may swallow an interrupt
query = lake.sql("select sum(i) from rollouts, range(100000000000) t(i)")
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    query.arrow()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_in_a_program_ends_its_statement(lake: Lake) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, lake.path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


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

"""Results in each format, on stdout and in files."""

import io
import json
import os
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trajreplay import Lake
from trajreplay.cli.terminal.output import Output

ROWS = pa.table(
    {
        "run_id": ["a", "b\x1b[31m"],
        "rows": pa.array([1, None], pa.int64()),
        "reward": [0.1, float("nan")],
        "log_probs": pa.array([[-0.5, -1.0], []], pa.list_(pa.float32())),
    }
)


def written(format_name: str, table: pa.Table, path: Path) -> bytes:
    Output(format_name, path).rows(table)
    return path.read_bytes()


def test_a_table_is_for_people(tmp_path: Path) -> None:
    assert written("table", ROWS, tmp_path / "out").decode() == (
        "run_id     rows  reward  log_probs\n"
        "---------  ----  ------  ------------\n"
        "a             1     0.1  [-0.5, -1.0]\n"
        "b\\x1b[31m  null     NaN  []\n"
    )


def test_json_is_one_array(tmp_path: Path) -> None:
    assert json.loads(written("json", ROWS, tmp_path / "out")) == [
        {"run_id": "a", "rows": 1, "reward": 0.1, "log_probs": [-0.5, -1.0]},
        {"run_id": "b\x1b[31m", "rows": None, "reward": "NaN", "log_probs": []},
    ]
    assert written("json", ROWS.slice(0, 0), tmp_path / "out") == b"[]\n"


def test_ndjson_is_a_row_a_line(tmp_path: Path) -> None:
    assert written("ndjson", ROWS, tmp_path / "out").decode() == (
        '{"run_id": "a", "rows": 1, "reward": 0.1, "log_probs": [-0.5, -1.0]}\n'
        '{"run_id": "b\\u001b[31m", "rows": null, "reward": "NaN", "log_probs": []}\n'
    )


def test_csv_has_a_header(tmp_path: Path) -> None:
    assert written("csv", ROWS, tmp_path / "out").decode() == (
        'run_id,rows,reward,log_probs\na,1,0.1,"[-0.5, -1.0]"\nb\\x1b[31m,,NaN,[]\n'
    )


def test_parquet_keeps_types_and_has_no_statistics_on_floats(tmp_path: Path) -> None:
    content = io.BytesIO(written("parquet", ROWS, tmp_path / "out"))
    file = pq.ParquetFile(content)
    assert file.schema_arrow.equals(ROWS.schema)
    group = file.metadata.row_group(0)
    known = {
        group.column(index).path_in_schema: group.column(index).is_stats_set
        for index in range(group.num_columns)
    }
    assert known == {
        "run_id": True,
        "rows": True,
        "reward": False,
        "log_probs.list.element": False,
    }


def test_a_long_table_is_cut_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pa.table({"n": pa.array(range(10_002), pa.int32())})
    assert len(written("table", rows, tmp_path / "out").splitlines()) == 10_002
    assert capsys.readouterr().err == (
        "2 further rows not shown. For all of them: --format ndjson, csv or parquet.\n"
    )
    assert len(written("ndjson", rows, tmp_path / "out").splitlines()) == 10_002


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    path.write_text("before")

    def failing() -> pa.RecordBatchReader:
        def batches() -> object:
            yield from ROWS.to_batches()
            raise OSError("disk")

        return pa.RecordBatchReader.from_batches(ROWS.schema, batches())

    with pytest.raises(OSError, match="disk"):
        Output("csv", path).rows(failing())
    assert path.read_text() == "before"
    assert [one.name for one in tmp_path.iterdir()] == ["out.csv"]


def test_a_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    written("csv", ROWS, tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode


def test_notes_go_to_stderr_unless_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    Output("table", None).note("two captures \x1b left out")
    Output("table", None, quiet=True).note("unheard")
    assert capsys.readouterr() == ("", "two captures \\x1b left out\n")


def test_parquet_does_not_go_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with pytest.raises(click.UsageError, match="Parquet is binary"):
        Output("parquet", None)


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Output("table", None).has_color
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert Output("table", None).has_color
    assert not Output("table", Path("out")).has_color
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Output("table", None).has_color


def test_nothing_but_a_plain_file_outside_a_lake_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")
    lake = Lake.create(tmp_path / "lake")
    inside = Path(lake.path) / "lake.json"
    before = inside.read_bytes()
    for path in (tmp_path / "link", tmp_path / "pipe", inside, Path(lake.path) / "data" / "x"):
        path.parent.mkdir(exist_ok=True)
        with pytest.raises(click.UsageError):
            written("csv", ROWS, path)
    assert (tmp_path / "target").read_bytes() == b"kept"
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "pipe").is_fifo()
    assert inside.read_bytes() == before

"""`trajreplay schema`: the declarations as rows."""

import csv
import json
from pathlib import Path

from tests.helpers.cli import run
from tests.helpers.small_lakes import healthy_lake
from trajreplay.cli.verbs.schema import tables, type_name
from trajreplay.schema import STAGES


def test_every_column_of_every_table_is_listed() -> None:
    outcome = run("schema", "--format", "csv")
    assert (outcome.code, outcome.err) == (0, "")
    rows = list(csv.DictReader(outcome.out.splitlines()))
    assert [(row["table"], row["column"]) for row in rows] == [
        (table.name, column.name) for table in tables().values() for column in table.columns
    ]


def test_one_table_can_be_asked_for() -> None:
    outcome = run("schema", "checksums", "--format", "ndjson")
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    assert {row["table"] for row in rows} == {"checksums"}
    assert rows[0] == {
        "table": "checksums",
        "column": "run_id",
        "type": "string",
        "unit": "",
        "role": "key",
        "nullable": False,
        "doc": "Training job.",
    }


def test_types_are_short() -> None:
    rows = json.loads(run("schema", "steps", "--format", "json").out)
    types = {row["column"]: row["type"] for row in rows}
    assert types["log_probs"] == "list<float32>"
    assert types["raw_reward"] == "float64"
    assert types["weight_versions"] == "list<struct<start: int32, stop: int32, version: int64>>"


def test_the_stages_are_listed_with_their_equations() -> None:
    rows = json.loads(run("schema", "--stages", "--format", "json").out)
    assert [row["stage"] for row in rows] == [stage.name for stage in STAGES]
    assert rows[2]["equation"] == "reward_i = (r_i - mean_g) / (std_g + epsilon)"


def test_the_joined_table_is_listed_as_sql_has_it(tmp_path: Path) -> None:
    rows = json.loads(run("schema", "samples", "--format", "json").out)
    view = healthy_lake(tmp_path / "lake").sql("select * from samples").arrow().schema
    assert [row["column"] for row in rows] == view.names
    columns = [row["type"].partition("<")[0] for row in rows]
    assert columns == [type_name(one.type).replace("large_", "").partition("<")[0] for one in view]


def test_documentation_is_not_cut_in_a_table() -> None:
    assert "…" not in run("schema").out


def test_an_unknown_table_is_a_usage_error() -> None:
    outcome = run("schema", "nonsense")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.endswith(
        "Error: Invalid value for 'TABLE': unknown table 'nonsense', expected one of "
        "rollouts, steps, outputs, routes, events, manifest, checksums, samples\n"
    )


def test_a_table_and_stages_exclude_each_other() -> None:
    assert run("schema", "steps", "--stages").code == 2

import json
from pathlib import Path

import pytest

from tests.helpers.captures import record, sample
from tests.helpers.mutate import data_file, entry_file
from tests.helpers.queried import write_rollout, write_step
from trajreplay import Lake, ProducerInfo, QueryError


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def test_one_row_a_capture_set_with_its_status(lake: Lake) -> None:
    write_rollout(lake, 0)
    write_step(lake, 0, 0, ranks=[1])
    write_rollout(lake, 1)
    write_rollout(lake, 1, attempt=1, resumed_from=(0, 1), ranks=[0])
    entries = write_rollout(lake, 2, attempt=1)
    entry_file(lake, entries[0].key).write_bytes(b"{}")
    rows = lake.info().to_pylist()
    assert [
        (row["attempt"], row["rollout_id"], row["step_id"], row["ranks"], row["status"])
        for row in rows
    ] == [
        (0, 0, None, [0, 1], "complete"),
        (0, 0, 0, [1], "incomplete"),
        (0, 1, None, [0, 1], "superseded"),
        (1, 1, None, [0], "incomplete"),
        (1, 2, None, [1], "refused"),
    ]
    assert rows[0]["samples"] == 4
    assert rows[0]["tokens"] == 2 + 3 + 4 + 5
    assert rows[0]["bytes"] > 1000
    assert rows[0]["problem"] is None
    assert "no capture of rank 0" in rows[1]["problem"]


def test_one_run_can_be_shown(lake: Lake) -> None:
    write_rollout(lake, 0)
    write_rollout(lake, 0, run_id="x")
    assert lake.info().num_rows == 2
    assert lake.info("x")["run_id"].to_pylist() == ["x"]
    with pytest.raises(QueryError, match="no run 'y'"):
        lake.info("y")


def test_an_empty_lake_has_no_rows(lake: Lake) -> None:
    assert lake.info().num_rows == 0


def test_a_capture_set_is_described_as_plain_data(lake: Lake) -> None:
    record(
        lake,
        lambda capture: capture.samples([sample(0, micro_batch_id="mb-7")]),
        lambda capture: capture.tensor("log_probs", [[-1.0, -2.0]]),
        lambda capture: capture.expected("loss.policy", loss=0.5),
        step_id=3,
        producer=ProducerInfo(commit="abc", torch_version="2.13.0"),
        stages=["sample", "loss.policy"],
    )
    found = lake.inspect(0, 3).to_json()
    assert json.loads(json.dumps(found)) == found
    (capture,) = found["captures"]
    assert (found["status"], found["problems"]) == ("complete", [])
    assert capture["producer"]["commit"] == "abc"
    assert capture["contracts"]["loss.policy"]["capability"] == "recompute"
    assert capture["settings"]["loss"]["eps_clip"] == 0.2
    assert capture["files"][0]["columns"]["log_probs"]["values"] == 2
    assert capture["outputs"][0]["value"] == 0.5
    assert capture["provenance"]["micro_batch_id"] == ["mb-7"]
    assert capture["sources"] == [[0, 0]]


def test_an_incomplete_and_damaged_set_is_described_as_far_as_it_goes(lake: Lake) -> None:
    entries = write_rollout(lake, 0, expected_ranks=[0, 1, 2])
    entry_file(lake, entries[0].key).write_bytes(b"{}")
    data_file(lake, entries[1].key).unlink()
    found = lake.inspect(0)
    assert found.status == "refused"
    assert len(found.problems) == 2
    damaged, missing = found.captures
    assert "digest" in damaged["problem"]
    assert missing["samples"] == 2
    assert "is missing" in missing["provenance"]["problem"]


def test_what_is_not_there_or_ambiguous_is_an_error(lake: Lake) -> None:
    write_rollout(lake, 0)
    write_rollout(lake, 0, run_id="x")
    with pytest.raises(QueryError, match="no capture of rollout 9"):
        lake.inspect(9)
    with pytest.raises(QueryError, match="no capture of rollout 0 step 4"):
        lake.inspect(0, 4)
    with pytest.raises(QueryError, match="rollout 0 is there 2 times"):
        lake.inspect(0)
    assert lake.inspect(0, run="x").cohort.run_id == "x"


def test_a_superseded_attempt_can_be_inspected(lake: Lake) -> None:
    write_rollout(lake, 0)
    write_rollout(lake, 0, attempt=1, resumed_from=(0, 0))
    assert lake.inspect(0).cohort.attempt == 1
    assert lake.inspect(0, attempt=0).status == "superseded"

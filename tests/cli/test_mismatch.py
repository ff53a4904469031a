"""`trajreplay mismatch`: the table of a certification, other formats, exit codes."""

import json
from pathlib import Path

import pytest

from tests.helpers.cli import run
from tests.helpers.mismatches import (
    MASK,
    OLD,
    ROLLOUT,
    replayed_routing,
    write_pair,
    write_with_figures,
)
from trajreplay import Lake


@pytest.fixture
def small(tmp_path: Path) -> Lake:
    """Two steps of one run."""
    lake = Lake.create(tmp_path / "lake")
    for step_id in range(2):
        write_pair(lake, OLD, ROLLOUT, MASK, step_id=step_id)
    return lake


def test_the_table_of_routing_replayed_beside_routing_that_is_not(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    write_with_figures(lake, "R3 off", replayed_routing("seed_off"))
    write_with_figures(lake, "R3 on", replayed_routing("seed_on_mismatch_only"))
    done = run("mismatch", "--lake", lake.path, "--run", "R3 off", "--run", "R3 on")
    assert done.code == 0
    table = [
        [one.strip() for one in line.split("  ") if one.strip()] for line in done.out.splitlines()
    ]
    assert table[0] == ["measurement", "R3 off", "R3 on"]
    assert table[2:7] == [
        [
            "generation KL mean / range",
            "0.00250 / 0.0022966-0.0027089",
            "0.0003876 / 0.0003615-0.0004061",
        ],
        ["valid tokens", "3,858,221", "1,291,712"],
        ["abs(delta log p) > 0.5", "7,873 (0.204 %)", "4 (0.000310 %)"],
        ["abs(delta log p) > 1.0", "570 (0.0148 %)", "0"],
        ["max abs(delta log p)", "37.7257", "0.676"],
    ]
    (ratio,) = (line for line in table if line[:1] == ["generation_kl"])
    assert ratio[:4] == ["generation_kl", "R3 off", "R3 on", "0.15504"]


def test_one_run_is_a_column_and_the_pair_is_said(small: Lake) -> None:
    done = run("mismatch", "--lake", small.path)
    assert done.code == 0
    lines = done.out.splitlines()
    assert " ".join(lines[2].split()) == (
        "generation KL mean / range 0.0255701 / 0.0255701-0.0255701"
    )
    assert lines[-1] == "old_log_probs (trainer) against rollout_log_probs (sampler), of steps"


def test_json_has_every_statistic_and_the_findings(small: Lake) -> None:
    done = run("mismatch", "--lake", small.path, "--format", "json", "--by", "step")
    found = json.loads(done.out)
    assert [(row["rollout_id"], row["step_id"]) for row in found["rows"]] == [(0, 0), (0, 1)]
    assert found["rows"][0]["token_mult_prob_error"] == pytest.approx(1.20987928, rel=2e-6)
    assert (found["levels"], found["findings"]) == ({"r": "step"}, [])


def test_a_row_a_group(small: Lake) -> None:
    done = run("mismatch", "--lake", small.path, "--by", "step,rank")
    head, _, first, *_ = done.out.splitlines()
    assert head.split()[:5] == ["run_id", "rollout_id", "step_id", "rank", "valid_tokens"]
    assert first.split()[:5] == ["r", "0", "0", "0", "5"]


def test_equal_columns_end_with_1_and_say_why(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    write_pair(lake, OLD, OLD, MASK)
    done = run("mismatch", "--lake", lake.path)
    assert done.code == 1
    assert "error: run r: old_log_probs and rollout_log_probs are equal in every token" in done.out
    rows = run("mismatch", "--lake", lake.path, "--format", "csv")
    assert (rows.code, rows.err.partition(":")[0]) == (1, "error")


def test_a_column_that_is_a_copy_ends_with_3(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    write_pair(lake, OLD, OLD, MASK, source="copy:rollout_log_probs")
    done = run("mismatch", "--lake", lake.path)
    assert (done.code, done.out) == (3, "")
    assert "old_log_probs is a copy of rollout_log_probs" in done.err


@pytest.mark.parametrize(
    "options", [["--by", "batch"], ["--step", "0:0", "--rollout", "0"], ["--over", "-1"]]
)
def test_what_cannot_be_asked_ends_with_2(options: list[str], small: Lake) -> None:
    assert run("mismatch", "--lake", small.path, *options).code == 2

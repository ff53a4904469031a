"""`trajreplay mismatch`: the table of a certification, other formats, exit codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.captures import record, sample
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


def write_routes(lake: Lake, run_id: str, *, differing: bool) -> None:
    """One step of four tokens in two layers; the last is far off, and has other experts or not."""
    routes = np.arange(5 * 2 * 2, dtype=np.int8).reshape(5, 2, 2)
    sampled = routes.copy()
    sampled[0, 0] = sampled[0, 0][::-1]  # the first token has the same experts in another order
    if differing:
        sampled[3, 1] = 99

    def hand_over(capture: Any) -> None:
        capture.samples([sample(0, 4)])
        capture.tensor("old_log_probs", [[-1.0, -1.25, -1.0, -3.0]], source="trainer")
        capture.tensor("rollout_log_probs", [[-1.0] * 4], source="sampler")
        capture.routes("old_experts", [routes], layer_numbers=[3, 8])
        capture.routes("rollout_experts", [sampled], layer_numbers=[3, 8])

    record(lake, hand_over, run_id=run_id, step_id=0, stages=[])


def test_routes_say_by_layer_whether_differing_tokens_carry_the_tail(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    write_routes(lake, "off", differing=True)
    write_routes(lake, "on", differing=False)
    done = run("mismatch", "--routes", "--lake", lake.path, "--run", "off", "--run", "on")
    assert (done.code, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert lines[0] == "run off: old_experts against rollout_experts, of steps"
    assert lines[3:6] == [
        "all 4 75 % 50 % 0 0.00 0.245 0.250 0 2.00 2.00 2.00 1 (100 %)",
        "3 4 100 % 75 % 0 0.125 1.9475 2.00 1 (25.0 %) - - - 0",
        "8 4 75 % 75 % 0 0.00 0.245 0.250 0 2.00 2.00 2.00 1 (100 %)",
    ]
    assert lines[6] == (
        "Of 1 tokens with abs(delta log p) > 0.5, 1 (100 %) have other experts in some layer; of "
        "all 4, 1 (25.0 %)."
    )
    assert lines[8] == "run on: old_experts against rollout_experts, of steps"
    assert lines[-1].startswith("Of 1 tokens with abs(delta log p) > 0.5, 0 have other experts")


def test_routes_come_in_every_format_and_refuse_what_they_have_not(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    write_routes(lake, "r", differing=True)
    command = ("mismatch", "--routes", "--lake", lake.path)
    rows = [json.loads(one) for one in run(*command, "--format", "ndjson").out.splitlines()]
    assert [(row["layer"], row["equal_sets"]) for row in rows] == [
        (None, 0.75),
        (3, 1.0),
        (8, 0.75),
    ]
    document = json.loads(run(*command, "--format", "json", "--over", "3").out)
    assert document["threshold"] == 3
    assert document["names"] == ["old_experts", "rollout_experts"]
    assert [row["differing_over"] for row in document["rows"]] == [0, 0, 0]
    for option in (("--by", "step"), ("--cap", "3"), ("--level", "step"), ("--all",)):
        refused = run(*command, *option)
        assert refused.code == 2
        assert f"--routes has no {option[0]}" in refused.err
    assert run(*command, "--over", "1", "--over", "2").code == 2
    assert run(*command, "--pair", "log_probs:rollout_log_probs").code != 0

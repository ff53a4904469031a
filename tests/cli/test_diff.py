"""`trajreplay diff`: what it prints, formats, exit codes."""

import json
from pathlib import Path

import pytest

from tests.helpers.cli import run
from tests.helpers.small_lakes import gappy_lake, rollout
from trajreplay import Lake


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """Run a, and run b, whose rollout 1 has another reward."""
    made = Lake.create(tmp_path / "lake")
    for rollout_id in range(2):
        rollout(made, rollout_id, run_id="a")
        rollout(made, rollout_id, run_id="b", **({"reward": 5.5} if rollout_id else {}))
    return tmp_path / "lake"


def test_the_first_difference_is_the_first_line(lake: Path) -> None:
    outcome = run("diff", "a", "b", "--lake", lake)
    assert (outcome.code, outcome.err) == (1, "")
    lines = outcome.out.splitlines()
    assert lines[0] == (
        "first difference: rollout 1, stage reward.post_process, reward of sample s-0 "
        "(rank 0): 0.707105781 in run a, 5.5 in run b"
    )
    assert lines[2] == "fields that differ:"
    assert lines[5].split()[:6] == ["rollout", "1", "reward.post_process", "reward", "1/2", "1/2"]
    assert lines[-1] == (
        "different: run a and run b: 2 cohorts compared, 1 identical, 1 field differs, "
        "0 settings differ"
    )


def test_equal_runs_exit_0(lake: Path) -> None:
    outcome = run("diff", "a", "a", "--lake", lake)
    assert outcome.code == 0
    assert outcome.out.startswith("same: run a and run a: 2 cohorts compared, 2 identical")


def test_growth_is_rows_and_the_report_is_json(lake: Path) -> None:
    rows = run("diff", "a", "b", "--lake", lake, "--format", "ndjson").out.splitlines()
    assert [json.loads(row)["max_abs"] for row in rows] == [pytest.approx(4.792894)]
    document = json.loads(run("diff", "a", "b", "--lake", lake, "--format", "json").out)
    assert document["first"]["stage"] == "reward.post_process"


def test_a_lake_is_held_against_another(lake: Path, tmp_path: Path) -> None:
    other = Lake.create(tmp_path / "other")
    rollout(other, 0, run_id="a")
    outcome = run("diff", "a", "--lake", lake, "--against", tmp_path / "other")
    assert outcome.code == 1
    assert f"only in run a of {lake}: rollout 1\n" in outcome.out


def test_what_could_not_be_compared_exits_3(tmp_path: Path) -> None:
    path = Path(gappy_lake(tmp_path / "gappy").path)
    outcome = run("diff", "--lake", path, "--against", path)
    assert outcome.code == 3
    assert "rollout 1: refused: " in outcome.out


@pytest.mark.parametrize(
    "args",
    [(), ("a",), ("a", "b", "c"), ("a", "nobody"), ("a", "--attempt", "0", "--attempt", "7")],
)
def test_a_wrong_command_line_is_a_usage_error(lake: Path, args: tuple[str, ...]) -> None:
    outcome = run("diff", *args, "--lake", lake)
    assert (outcome.code, outcome.out) == (2, "")


@pytest.mark.parametrize("changed", [False, True])
def test_two_attempts_of_a_run_are_held_against_each_other(tmp_path: Path, changed: bool) -> None:
    made = Lake.create(tmp_path / "lake")
    for attempt in range(2):
        more = {"reward": 5.5} if attempt and changed else {}
        rollout(made, 0, run_id="a", attempt=attempt, **more)
    outcome = run("diff", "--lake", made.path, "--attempt", "0", "--attempt", "1")
    assert (outcome.code, outcome.err) == (int(changed), "")
    told = "run a attempt 0 and run a attempt 1: 1 cohort compared"
    assert f"{'different' if changed else 'same'}: {told}" in outcome.out
    if changed:
        first = "first difference: rollout 0, stage reward.post_process, reward of sample s-0"
        assert outcome.out.startswith(first)
        assert outcome.out.splitlines()[0].endswith("in run a attempt 0, 5.5 in run a attempt 1")

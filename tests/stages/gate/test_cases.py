"""The gate's verdict on every case of a run: pass or fail, for these reasons, with this code."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import run
from tests.helpers.gates import CASES, RUN, gate_cases, written
from trajreplay import Lake

ROOT = Path(__file__).parents[3]
# Does what the job of a case did, as the attempt that it is started as, and ends as it ended.
JOB = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.helpers.gates import CASES, gate_cases, write_events
from trajreplay import Lake
(case,) = [one for one in gate_cases() if one["name"] == sys.argv[2]]
attempt = int(os.environ["TRAJREPLAY_ATTEMPT"])
write_events(Lake.open(os.environ["TRAJREPLAY_LAKE"]), case, {case["attempt"]: attempt})
traces = Path(sys.argv[3])
traces.mkdir()
for file in (CASES / case["routes"]["dir"]).glob("*.jsonl"):
    lines = [json.loads(line) | {"time": time.time()} for line in file.read_text().splitlines()]
    (traces / file.name).write_text("".join(json.dumps(line) + "\\n" for line in lines))
if case["command_signal"]:
    os.kill(os.getpid(), case["command_signal"])
sys.exit(case["command_exit"])
"""


def stated(case: dict[str, Any], traces: Path | None = None) -> list[str | Path]:
    """How the command line states the policy of a case."""
    given: list[str | Path] = ["--max-steps", str(case["max_steps"]), "--kind", case["run_kind"]]
    if case["routes"] is not None:
        folder = CASES / case["routes"]["dir"] if traces is None else traces
        given += ["--traces", folder, "--contract", case["routes"]["transport"]]
    return given


def check(case: dict[str, Any], code: int, verdict: dict[str, Any]) -> None:
    """Hold an exit code and a verdict file against a case."""
    assert verdict["verdict"] == case["verdict"], verdict["failing"]
    assert set(case["failing"]) <= set(verdict["failing"])
    if case.get("failing_all") is not None:
        assert set(verdict["failing"]) == set(case["failing_all"])
    certifies = case["verdict"] == "pass" and case["run_kind"] != "intermediate"
    assert verdict["certifies"] == certifies
    assert code == case["exit"]


@pytest.mark.parametrize(
    "case", [one for one in gate_cases() if one["command_exit"] == 0], ids=lambda one: one["name"]
)
def test_a_case_has_its_verdict(case: dict[str, Any], tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    attempts = ",".join(map(str, written(lake, case)))
    outcome = run(
        *("gate", "router-replay", "--lake", lake.path, "--run", RUN, "--attempts", attempts),
        *(*stated(case), "--command-exit", "0", "--format", "json"),
    )
    check(case, outcome.code, json.loads(outcome.out))


@pytest.mark.parametrize(
    "case", [one for one in gate_cases() if one["command_exit"] != 0], ids=lambda one: one["name"]
)
def test_a_case_of_a_command_that_fails_keeps_its_code(
    case: dict[str, Any], tmp_path: Path
) -> None:
    file, traces = tmp_path / "verdict.json", tmp_path / "traces"
    outcome = run(
        *("certify", "--policy", "router-replay", "--lake", tmp_path / "lake", "--run", RUN),
        *(*stated(case, traces), "--verdict", file, "--", sys.executable, "-c", JOB),
        *(ROOT, case["name"], traces),
    )
    verdict = json.loads(file.read_text())
    check(case, outcome.code, verdict)
    assert verdict["command"] == {"exit": case["command_exit"], "signal": case["command_signal"]}

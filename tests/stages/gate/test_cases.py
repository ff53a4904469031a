"""The gate's verdict on every case of a run: pass or fail, for these reasons, with this code."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gates import CASES, gate_cases, written
from trajreplay import Lake
from trajreplay.stages.gate import load_gate_policy


@pytest.mark.parametrize("case", gate_cases(), ids=lambda case: case["name"])
def test_a_case_has_its_verdict(case: dict[str, Any], tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    attempts = written(lake, case)
    policy = load_gate_policy("router-replay", max_steps=case["max_steps"], run=case["run_kind"])
    if case["routes"] is not None:
        traces = str(CASES / case["routes"]["dir"])
        contract = case["routes"]["transport"]
        policy = policy.with_parameters("routes", traces=traces, contract=contract)
    verdict = Lake.open(lake.path).gate(
        policy,
        attempts=attempts,
        command_exit=case["command_exit"],
        command_signal=case["command_signal"],
    )
    assert verdict.verdict == case["verdict"], verdict.failing
    assert set(case["failing"]) <= set(verdict.failing)
    if case.get("failing_all") is not None:
        assert set(verdict.failing) == set(case["failing_all"])
    assert verdict.certifies == (case["verdict"] == "pass" and case["run_kind"] != "intermediate")

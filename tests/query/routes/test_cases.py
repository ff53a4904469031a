"""Recorded traces of both contracts: each healthy one passes, each defect is named and placed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from trajreplay.query.routes import RoutePolicy, RouteReport, check_routes

CASES = Path(__file__).parents[2] / "cases" / "r3_traces"
VERDICTS = json.loads((CASES / "verdicts.json").read_text(encoding="utf-8"))


def failed(report: RouteReport) -> set[str]:
    return {one.rule for one in report.findings if one.severity == "failure"}


@pytest.mark.parametrize("case", VERDICTS, ids=lambda case: str(case["name"]))
def test_a_trace_gets_its_verdict_and_its_defect_is_named_and_placed(case: dict[str, Any]) -> None:
    report = check_routes(CASES / case["dir"], RoutePolicy(case["transport"]))
    assert report.verdict == case["sound"]
    if case["rule"] is None:
        assert failed(report) == set()
        return
    assert case["rule"] in failed(report)
    assert failed(report) <= {case["rule"], *case["also_acceptable"]}
    where = (case["where"] or {}).items()
    assert any(one.rule == case["rule"] and where <= one.where.items() for one in report.findings)


@pytest.mark.parametrize(
    "told",
    [
        {"since": 1795980000.0},
        {"processes": ("nid001000.cluster.example:41001", "nid001000.cluster.example:41002")},
    ],
)
def test_of_two_runs_the_one_that_is_told_is_checked_and_the_rest_counted(
    told: dict[str, Any],
) -> None:
    report = check_routes(CASES / "la_two_runs_mixed", RoutePolicy("legacy-async", **told))
    assert report.verdict == "pass"
    assert (report.records, report.left_out) == (92, 92)


def test_a_put_that_was_repeated_is_a_remark() -> None:
    report = check_routes(CASES / "tq_healthy_dup_same", RoutePolicy("transfer-queue"))
    assert [(one.severity, one.rule) for one in report.findings] == [
        ("remark", "producer.duplicate")
    ]


def test_a_stage_that_the_policy_declares_absent_may_not_be_there(tmp_path: Path) -> None:
    policy = RoutePolicy("legacy-async", stages=("train",))
    report = check_routes(CASES / "la_healthy", policy)
    assert failed(report) == {"stage.forbidden"}
    shutil.copytree(CASES / "la_healthy", tmp_path / "trace")
    for file in (tmp_path / "trace").iterdir():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if '"stage": "prev-logprob"' not in line]
        file.write_text("".join(kept), encoding="utf-8")
    assert check_routes(tmp_path / "trace", policy).verdict == "pass"
    assert failed(check_routes(tmp_path / "trace", RoutePolicy("legacy-async"))) == {
        "assign.coverage"
    }


def test_the_contract_is_never_inferred() -> None:
    as_queue = check_routes(CASES / "la_healthy", RoutePolicy("transfer-queue"))
    assert failed(as_queue) == {"producer.coverage"}
    as_legacy = check_routes(CASES / "tq_healthy", RoutePolicy("legacy-async"))
    assert failed(as_legacy) == {"contract.mixed"}


def test_layers_that_the_policy_states_have_to_be_replayed() -> None:
    report = check_routes(CASES / "la_healthy", RoutePolicy("legacy-async", layers=(2, 3, 4, 5)))
    assert failed(report) == {"layer.coverage"}
    report = check_routes(CASES / "la_healthy", RoutePolicy("legacy-async", layers=(2, 3)))
    assert failed(report) == {"layer.coverage"}


def test_what_previews_decide_is_decided_in_these_traces() -> None:
    for name, contract in (("tq_healthy_pp2cp2", "transfer-queue"), ("la_healthy", "legacy-async")):
        policy = RoutePolicy(contract, require=("cp.reassembly", "installed.payload"))  # type: ignore[arg-type]
        assert check_routes(CASES / name, policy).verdict == "pass", name


def test_the_report_names_steps_ranks_and_layers() -> None:
    report = check_routes(CASES / "tq_healthy_pp2cp2", RoutePolicy("transfer-queue"))
    assert report.steps == {"prev-logprob": [1], "train": [1]}
    assert (report.ranks, report.layers) == ((0, 1, 2, 3), (2, 3, 4))
    assert json.loads(json.dumps(report.to_json()))["verdict"] == "pass"
    assert report.arrow().num_rows == 0

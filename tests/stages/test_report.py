import json
import math
from typing import Any

import pytest

from trajreplay.stages import CohortReport, Divergence, Finding, Report, StageResult
from trajreplay.stages.report import json_float


def _cohort(verdicts: dict[str, Any], rollout_id: int = 0, step_id: int | None = 0) -> CohortReport:
    stages = [StageResult(name, verdict) for name, verdict in verdicts.items()]
    return CohortReport("r", 0, rollout_id, step_id, [0], stages)


def test_the_json_form_is_stable() -> None:
    result = StageResult("advantage.kl", "diverged", isolated="diverged", max_abs_error=math.inf)
    result.divergences.append(Divergence("kl", 1.0, 0.5, "s-0", "g-0", 1, 2))
    cohort = CohortReport("r", 0, 120, None, [0, 1], [result])
    cohort.findings.append(Finding("copy", "error", "differs", "sample", "s-0", 3))
    assert Report([cohort]).to_json() == {
        "format": 1,
        "verdict": "diverged",
        "first_divergent_stage": "advantage.kl",
        "cohorts": [
            {
                "run_id": "r",
                "attempt": 0,
                "rollout_id": 120,
                "step_id": None,
                "ranks": [0, 1],
                "verdict": "diverged",
                "first_divergent_stage": "advantage.kl",
                "findings": [
                    {
                        "check": "copy",
                        "severity": "error",
                        "stage": "sample",
                        "sample_id": "s-0",
                        "token": 3,
                        "message": "differs",
                    }
                ],
                "stages": [
                    {
                        "stage": "advantage.kl",
                        "version": "v2",
                        "capability": "recompute",
                        "verdict": "diverged",
                        "isolated": "diverged",
                        "chained": None,
                        "inherited": False,
                        "suspect": None,
                        "message": "",
                        "max_abs_error": "Infinity",
                        "chained_error": None,
                        "mismatches": 0,
                        "compared": 0,
                        "non_finite": 0,
                        "ranks": [],
                        "divergences": [
                            {
                                "field": "kl",
                                "sample_id": "s-0",
                                "group_id": "g-0",
                                "rank": 1,
                                "token": 2,
                                "recorded": 1.0,
                                "recomputed": 0.5,
                                "abs_error": 0.5,
                                "ratio": 2.0,
                            }
                        ],
                    }
                ],
            }
        ],
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (0.1, 0.1),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
        (-math.inf, "-Infinity"),
    ],
)
def test_what_json_has_no_number_for_is_a_word(value: float | None, expected: object) -> None:
    assert json_float(value) == expected
    assert json.loads(json.dumps(json_float(value), allow_nan=False)) == expected


def test_a_ratio_is_told_where_it_is_a_number() -> None:
    assert Divergence("x", 3.0, -1.5).ratio == -2.0
    assert Divergence("x", 3.0, 0.0).ratio is None
    assert Divergence("x", math.inf, 2.0).ratio is None
    assert Divergence("x", 1.0, math.nan).ratio is None
    assert math.isnan(Divergence("x", 1.0, math.nan).abs_error)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({"sample": "pass", "loss.policy": "pass"}, "pass"),
        ({"sample": "pass", "loss.policy": "precision"}, "precision"),
        ({"sample": "pass", "loss.policy": "unverified"}, "unverified"),
        ({"sample": "diverged", "loss.policy": "unverified"}, "diverged"),
        ({"sample": "pass", "loss.policy": "skipped"}, "pass"),
        ({"sample": "pass", "loss.value": "unsupported"}, "pass"),
        ({"sample": "recorded-only", "loss.policy": "inspect-only"}, "unverified"),
        ({"sample": "skipped"}, "unverified"),
        ({}, "unverified"),
    ],
)
def test_a_cohort_takes_the_worst_of_its_stages(verdicts: dict[str, str], expected: str) -> None:
    assert _cohort(verdicts).verdict == expected


def test_a_refusal_outweighs_all_but_a_divergence() -> None:
    refused = _cohort({"sample": "pass", "loss.policy": "unverified"})
    refused.refusal = "no rank 1"
    diverged = _cohort({"sample": "diverged"})
    diverged.refusal = refused.refusal
    assert [refused.verdict, diverged.verdict] == ["refused", "diverged"]


def test_part_of_a_cohort_is_no_pass() -> None:
    partial = _cohort({"sample": "pass", "loss.policy": "pass"})
    partial.partial = True
    assert partial.verdict == "unverified"


def test_a_report_of_nothing_is_no_pass() -> None:
    assert (Report([]).verdict, Report([]).exit_code) == ("unverified", 3)


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("pass", 0), ("precision", 0), ("unverified", 3), ("diverged", 1)],
)
def test_the_exit_code_follows_from_the_verdict(verdict: str, code: int) -> None:
    report = Report(
        [_cohort({"sample": "pass"}), _cohort({"sample": verdict, "loss.policy": "pass"})]
    )
    assert report.exit_code == code


def test_the_first_divergent_stage_is_the_earliest_of_the_pipeline() -> None:
    cohort = _cohort({"loss.policy": "diverged", "advantage.kl": "diverged", "sample": "pass"})
    assert cohort.first_divergent_stage == "advantage.kl"
    assert _cohort({"sample": "pass"}).first_divergent_stage is None


def test_a_rollout_and_its_steps_are_one_pipeline() -> None:
    cohorts = [
        _cohort({"sample": "pass"}, 0, 0),
        _cohort({"advantage.kl": "diverged"}, 1, None),
        _cohort({"sample": "diverged"}, 1, 0),
        _cohort({"reward.raw": "diverged"}, 2, None),
    ]
    assert Report(cohorts).first_divergent_stage == "sample"

"""A capture's own tolerance may tighten the policy and never loosen it."""

from dataclasses import replace

import pytest

from tests.helpers.cohorts import (
    ALL_COLUMNS,
    ALL_STAGES,
)
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    the_cohort,
    verdicts,
    write_whole,
)
from trajreplay import Lake
from trajreplay.schema import Tolerance
from trajreplay.stages import Report


def _without(name: str) -> list[str]:
    return [one for one in ALL_COLUMNS if one != name]


def _off_by(lake: Lake, error: float, step_id: int, **tolerances: Tolerance) -> Report:
    samples = drawn()
    samples[0].columns["advantages"][0] += error
    named = {name.replace("__", "."): one for name, one in tolerances.items()}
    write_whole(lake, samples, step_id=step_id, tolerances=named)
    return lake.replay()


def test_a_capture_may_tighten_the_tolerance(lake: Lake) -> None:
    error = 5e-6
    assert verdicts(_off_by(lake, error, 0))["advantage.estimate"] == "pass"
    lake.refresh()
    tight = Tolerance(1e-9, 1e-9)
    report = _off_by(lake, error, 1, advantage__estimate=tight)
    assert verdicts(the_cohort(report, step_id=0))["advantage.estimate"] == "pass"
    assert verdicts(the_cohort(report, step_id=1))["advantage.estimate"] == "diverged"
    assert {one.check for one in the_cohort(report, step_id=1).findings} == {"handoff"}


def test_a_capture_cannot_loosen_the_tolerance_and_is_told_so(lake: Lake) -> None:
    report = _off_by(lake, 0.5, 0, advantage__estimate=Tolerance(10.0, 0.0))
    assert "advantage.estimate" in diverged(report)
    warnings = [one for one in report.cohorts[0].findings if one.check == "tolerance"]
    assert [one.stage for one in warnings] == ["advantage.estimate"] * 2
    assert "judged by" in warnings[0].message


@pytest.mark.parametrize("first_tight", [False, True])
def test_cohorts_with_and_without_a_tolerance_of_their_own_are_judged_each_by_its_own(
    lake: Lake, first_tight: bool
) -> None:
    way = replace(WAY, group_size=None)
    for step in (0, 1):
        samples = drawn(way)
        for one in samples:
            one.columns["advantages"] = (one.columns["advantages"] * 1.002).bfloat16()
        options = {}
        if (step == 0) == first_tight:
            options = {"tolerances": {"advantage.estimate": Tolerance(1e-6, 1e-4)}}
        stages = [one for one in ALL_STAGES if one != "loss.policy"]
        columns = _without("returns")
        write_whole(lake, samples, way, step_id=step, stages=stages, columns=columns, **options)
    report = lake.replay()
    for step in (0, 1):
        tight = (step == 0) == first_tight
        found = verdicts(the_cohort(report, step_id=step))["advantage.estimate"]
        assert found == ("diverged" if tight else "pass")

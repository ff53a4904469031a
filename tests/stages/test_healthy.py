"""Ten thousand healthy cohorts, of every profile and much between them, raise no alarm."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.healthy import write_training
from tests.helpers.healthy_composed import Draw, judged, trained
from tests.stages.test_composed import CHANGES, STAGES
from trajreplay import Lake
from trajreplay.schema.settings import PROFILES
from trajreplay.stages import CohortReport, Report

COHORTS, LAKES = 400, 4
# Under each profile, and under none: so many settings are drawn, and so many cohorts of each.
DRAWS, EACH = 22, 50
# How many times as many to draw, for a longer look.
TIMES = int(os.environ.get("TRAJREPLAY_HEALTHY_TIMES", "1"))
NAMED = {name: changes for name, (changes, _) in CHANGES.items()}


def _replayed(lake: Lake, first_seed: int, cohorts: int) -> Report:
    """Trainings of so many cohorts at least, each a run named after its seed."""
    seed, written = first_seed, 0
    while written < cohorts:
        written += write_training(lake, seed, str(seed))
        seed += 1
    report = lake.replay()
    assert len(report.cohorts) == written
    return report


def _alarms(cohorts: Sequence[CohortReport]) -> list[CohortReport]:
    """Cohorts that did not pass, or of which a check says that something is wrong."""
    return [
        one
        for one in cohorts
        if one.verdict not in ("pass", "precision")
        or any(found.severity == "error" for found in one.findings)
    ]


@pytest.mark.parametrize("number", range(LAKES))
def test_healthy_runs_in_a_lake_raise_no_alarm(tmp_path: Path, number: int) -> None:
    report = _replayed(Lake.create(tmp_path / "lake"), 10_000 * number, TIMES * COHORTS // LAKES)
    alarms = [one.to_json() for one in _alarms(report.cohorts)]
    assert not alarms, alarms[0]
    assert report.exit_code == 0
    found = Counter(one.verdict for one in report.cohorts)
    assert found["pass"] > found["precision"]


@pytest.mark.parametrize("profile", [None, *PROFILES])
def test_ten_thousand_healthy_cohorts_raise_no_alarm(tmp_path: Path, profile: str | None) -> None:
    """Nine sets of eleven hundred, each under a profile that is changed here and there."""
    compared = without = 0
    first = 100_000 * [None, *PROFILES].index(profile)
    for seed in range(first, first + TIMES * DRAWS):
        draw = Draw(seed, NAMED, STAGES)
        settings = draw.settings(profile)
        drawn = []
        for _ in range(EACH):
            shares = draw.shares(settings)
            drawn.append((shares, trained(settings, shares)))
        reports = judged(tmp_path / str(seed), settings, drawn, STAGES)
        alarms = [one.to_json() for one in _alarms(reports)]
        assert not alarms, (seed, settings, alarms[0])
        assert all({one.stage for one in cohort.stages} == {*STAGES} for cohort in reports)
        empty = [
            "no tokens that count" in one.message
            for cohort in reports
            for one in cohort.stages
            if not one.compared
        ]
        assert all(empty)
        without += bool(empty)
        compared += len(reports)
    assert compared == TIMES * DRAWS * EACH
    assert without <= TIMES * DRAWS // 5  # settings under which a cohort may hold nothing

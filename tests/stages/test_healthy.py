from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.healthy import write_training
from trajreplay import Lake
from trajreplay.stages import Report

COHORTS, LAKES = 1000, 8


def _replayed(lake: Lake, first_seed: int, cohorts: int) -> Report:
    """Trainings of so many cohorts at least, each a run named after its seed."""
    seed, written = first_seed, 0
    while written < cohorts:
        written += write_training(lake, seed, str(seed))
        seed += 1
    report = lake.replay()
    assert len(report.cohorts) == written
    return report


@pytest.mark.parametrize("number", range(LAKES))
def test_a_thousand_healthy_cohorts_raise_no_alarm(tmp_path: Path, number: int) -> None:
    report = _replayed(Lake.create(tmp_path / "lake"), 10_000 * number, COHORTS // LAKES)
    alarms = [one.to_json() for one in report.cohorts if one.verdict not in ("pass", "precision")]
    found = Counter(one.verdict for one in report.cohorts)
    print(f"{found['pass']} pass, {found['precision']} precision")  # noqa: T201
    assert not alarms, alarms[0]
    assert report.exit_code == 0
    assert found["pass"] > found["precision"]

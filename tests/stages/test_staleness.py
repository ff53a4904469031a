"""Weight versions: tokens sampled by weights that the trainer does not have yet are told."""

from pathlib import Path

import pytest

from trajreplay import Lake, SampleRecord, Settings
from trajreplay.stages import Report


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def replayed(lake: Lake, spans: list[int], current: int | None, old: int | None = None) -> Report:
    """A step of one sample, whose tokens were sampled by these weights."""
    with lake.capture(
        run_id="r",
        rollout_id=0,
        step_id=0,
        rank=0,
        expected_ranks=[0],
        settings=Settings(),
        stages=["sample"],
    ) as capture:
        versions = [(at, at + 1, version) for at, version in enumerate(spans)]
        length = len(spans)
        capture.samples([SampleRecord("s", length, length, [1] * length, weight_versions=versions)])
        values = [[-0.5 - 0.125 * at for at in range(length)]]
        capture.tensor("log_probs", values, source="trainer", weight_version=current)
        capture.tensor("old_log_probs", values, source="trainer", weight_version=old)
    return lake.replay()


def told(report: Report) -> list[tuple[str, str | None]]:
    (cohort,) = report.cohorts
    names = ("weights.newer", "weights.old-newer")
    return [(one.check, one.sample_id) for one in cohort.findings if one.check in names]


@pytest.mark.parametrize(
    ("spans", "current"), [([3, 3], 3), ([1, 2], 3), ([9, 9], None), ([0, 0], 0)]
)
def test_weights_of_before_are_no_finding(
    lake: Lake, spans: list[int], current: int | None
) -> None:
    assert told(replayed(lake, spans, current)) == []


@pytest.mark.parametrize(("spans", "current"), [([4, 4], 3), ([3, 5], 4)])
def test_weights_that_the_trainer_has_not_yet_are_told(
    lake: Lake, spans: list[int], current: int
) -> None:
    report = replayed(lake, spans, current)
    assert told(report) == [("weights.newer", "s")]
    assert report.verdict == "pass"  # a label, and no value


def test_old_log_probs_of_newer_weights_are_told(lake: Lake) -> None:
    assert told(replayed(lake, [2, 2], 3, old=4)) == [("weights.old-newer", None)]

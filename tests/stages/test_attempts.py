"""Attempts of a run: resumed, overlapping, incomplete."""

from typing import Any

from tests.helpers.scenes import (
    diverged,
    drawn,
    halves,
    refusals,
    the_cohort,
    write_rollout,
    write_step,
)
from trajreplay import Lake


def _attempt(lake: Lake, attempt: int, rollout_id: int, **options: Any) -> None:
    samples = drawn(rollout_id=rollout_id, seed=attempt)
    for one in samples:
        one.attempt = attempt
    write_rollout(lake, samples, attempt=attempt, **options)
    write_step(lake, samples, attempt=attempt, rollout_id=rollout_id, **options)


def test_a_resumed_attempt_supersedes_what_it_repeats(lake: Lake) -> None:
    for rollout_id in (0, 1, 2):
        _attempt(lake, 0, rollout_id)
    for rollout_id in (1, 2):
        _attempt(lake, 1, rollout_id, resumed_from=(0, 1))
    report = lake.replay()
    assert report.verdict == "pass"
    found = [(one.attempt, one.rollout_id, one.step_id) for one in report.cohorts]
    expected = [(0, 0), (1, 1), (1, 2)]
    assert found == [(*one, step) for one in expected for step in (None, 0)]
    older = lake.replay(attempt=0)
    assert {one.attempt for one in older.cohorts} == {0}
    assert len(older.cohorts) == 6


def test_attempts_that_overlap_without_a_resume_are_refused_until_one_is_chosen(
    lake: Lake,
) -> None:
    _attempt(lake, 0, 0)
    _attempt(lake, 1, 0)
    report = lake.replay()
    assert {one.verdict for one in report.cohorts} == {"refused"}
    assert "attempts 0, 1" in refusals(report.cohorts[0])
    for attempt in (0, 1):
        assert lake.replay(attempt=attempt).verdict == "pass"


def test_a_missing_rank_of_the_later_attempt_is_not_filled_from_the_older(lake: Lake) -> None:
    _attempt(lake, 0, 0)
    samples = drawn(seed=1)
    for one in samples:
        one.attempt = 1
    shares = halves(samples)
    write_rollout(lake, {0: shares[0]}, ranks=[0, 1], attempt=1, resumed_from=(0, 0))
    report = lake.replay()
    assert [(one.attempt, one.verdict) for one in report.cohorts] == [(1, "refused")]
    assert lake.replay(attempt=0).verdict == "pass"


def test_a_step_of_a_resumed_attempt_reads_the_rollout_of_the_attempt_that_it_names(
    lake: Lake,
) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    for one in samples:
        one.attempt = 0
    write_step(lake, samples, rollout_id=1, attempt=1, resumed_from=(0, 1))
    assert lake.replay().verdict == "pass"
    changed = [one.copy() for one in samples]
    changed[0].columns["advantages"][0] += 1.0
    write_step(lake, changed, rollout_id=1, step_id=1, attempt=1, resumed_from=(0, 1))
    lake.refresh()
    assert diverged(the_cohort(lake.replay(), 1, 1)) == ["sample"]

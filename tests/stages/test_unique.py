"""Samples that two data-parallel ranks hold: copies of whole ranks are errors, others are said."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import capture
from tests.helpers.scenes import WAY, drawn, the_cohort, the_stage
from tests.helpers.trainer import Sample
from trajreplay import Lake, ParallelCoordinates, with_changes
from trajreplay.stages import CohortReport

SAMPLES = drawn(WAY)


def _replayed(lake: Lake, shares: dict[int, list[Sample]], **options: Any) -> CohortReport:
    options.setdefault("step_id", 0)
    capture(lake, shares, WAY, stages=["sample"], **options)
    return the_cohort(lake.replay(), 0, options["step_id"])


def _checks(report: CohortReport) -> list[tuple[str, str]]:
    wanted = ("rank.doubled", "sample.duplicated")
    return [(one.check, one.severity) for one in report.findings if one.check in wanted]


@given(
    st.lists(st.sets(st.integers(0, 7), max_size=4), min_size=2, max_size=4),
    st.sampled_from([None, 0]),
)
def test_what_ranks_share_is_found_and_nothing_else(
    held: list[set[int]], step_id: int | None
) -> None:
    shares = {rank: [SAMPLES[row] for row in sorted(mine)] for rank, mine in enumerate(held)}
    doubled = sum(bool(mine) and mine in held[:at] for at, mine in enumerate(held))
    distinct = [one for at, one in enumerate(held) if one not in held[:at]]
    shared = {row for row in range(8) if sum(row in one for one in distinct) > 1}
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        report = _replayed(lake, shares, step_id=step_id)
    expected = [("rank.doubled", "error")] * doubled
    expected += [("sample.duplicated", "warning")] * bool(shared)
    assert _checks(report) == expected
    if doubled:
        assert the_stage(report, "sample").verdict == "diverged"
    for one in report.findings:
        if one.check == "sample.duplicated":
            assert one.message.split()[0] == str(len(shared))


def test_a_rank_that_is_a_copy_under_its_own_ids_is_named(lake: Lake) -> None:
    report = _replayed(lake, {0: SAMPLES[:4], 1: SAMPLES[4:], 2: SAMPLES[:4]})
    (found,) = [one for one in report.findings if one.check == "rank.doubled"]
    assert found.message.startswith("rank 2 holds the samples of rank 0, 4 of them: a copy")
    (explained,) = [one for one in lake.explain().explanations if one.stage == "sample"]
    assert explained.first is not None
    assert explained.first.faults == ("rank.doubled",)


def test_one_sample_of_each_of_two_rollouts_may_have_one_name(lake: Lake) -> None:
    other = SAMPLES[0].copy()
    other.rollout_id = 1
    assert _checks(_replayed(lake, {0: SAMPLES[:1], 1: [other]})) == []


def test_copies_that_say_so_are_none(lake: Lake) -> None:
    places = {0: ParallelCoordinates(tensor_size=2), 1: ParallelCoordinates(0, 1, 1, 2)}
    assert _checks(_replayed(lake, {0: SAMPLES, 1: SAMPLES}, parallel=places)) == []


def test_context_parallel_ranks_hold_the_same_samples(lake: Lake) -> None:
    places = {
        rank: ParallelCoordinates(rank // 2, 2, context_rank=rank % 2, context_size=2)
        for rank in range(4)
    }
    shares = {rank: SAMPLES[4 * (rank // 2) : 4 * (rank // 2) + 4] for rank in range(4)}
    settings = with_changes(WAY.full, {"layout.context": "whole"})
    report = _replayed(lake, shares, parallel=places, settings=settings)
    assert (report.verdict, _checks(report)) == ("pass", [])

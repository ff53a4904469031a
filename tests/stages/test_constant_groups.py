"""Groups of equal raw rewards: dropped, or held and not trained, and found where they are not."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import ALL_COLUMNS, ALL_STAGES, ROLLOUT_STAGES, capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.scenes import WAY, drawn, the_cohort, the_stage, write_rollout
from tests.helpers.trainer import Sample
from trajreplay import Lake, RewardSettings, Settings, with_changes
from trajreplay.stages import CohortReport, Finding

STEP_STAGES = tuple(one for one in ALL_STAGES if not one.startswith("loss."))
DROP, MASK = {"reward.constant_groups": "drop"}, {"reward.constant_groups": "mask"}
PLAIN = Settings(reward=RewardSettings(n_samples_per_prompt=4))
BY_BATCH: dict[str, dict[str, Any]] = {
    "a deviation": {"reward.std_grouping": "batch"},
    "rescaled": {"reward.rescale": "batch", "reward.batch_epsilon": 1e-4},
    "gpg": {"reward.rule": "gpg", "reward.divide_by_std": False},
    "whitened": {"advantage.whiten": "cohort"},
    "whitened by rank": {"advantage.whiten": "rank"},
}


def _samples(rewards: Sequence[float] = (1.0, 0.0, 0.25, 0.5, 0.3, 0.3, 0.3, 0.3)) -> list[Sample]:
    samples = drawn(WAY)
    for one, reward in zip(samples, rewards, strict=True):
        one.raw_reward = reward
    return samples


def _scored(samples: list[Sample], settings: Settings) -> list[Sample]:
    """Rewards and advantages as a trainer makes them that has these samples alone."""
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    return samples


def _step(lake: Lake, samples: list[Sample], settings: Settings, **options: Any) -> CohortReport:
    options.setdefault("stages", STEP_STAGES)
    capture(
        lake,
        {0: samples if options["stages"] == ["sample"] else _scored(samples, settings)},
        WAY,
        step_id=0,
        columns=ALL_COLUMNS,
        settings=settings,
        **options,
    )
    return the_cohort(lake.replay(), 0, 0)


def _filtered(report: CohortReport) -> list[Finding]:
    return [one for one in report.findings if one.check == "group.filter"]


def _masked(samples: list[Sample], rows: Sequence[int]) -> list[Sample]:
    for row in rows:
        samples[row].mask = [0] * len(samples[row].mask)
    return samples


@given(
    st.lists(st.sampled_from([0.0, 0.3, 0.3 + 1e-7, 1.0]), min_size=8, max_size=8),
    st.sampled_from([0.0, 1e-6]),
    st.sampled_from(["drop", "mask"]),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_what_is_trained_of_equal_rewards_is_found_and_nothing_else(
    rewards: list[float], within: float, how: str, masked: list[bool]
) -> None:
    settings = with_changes(
        PLAIN, {"reward.constant_groups": how, "reward.constant_within": within}
    )
    samples = _masked(_samples(rewards), [row for row in range(8) if masked[row]])
    expected = 0
    for start in (0, 4):
        members = rewards[start : start + 4]
        if len(set(members)) == 1 or (within and statistics.stdev(members) <= within):
            mine = [row for row in range(start, start + 4) if how == "drop" or not masked[row]]
            expected += len(mine)
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        report = _step(lake, samples, settings, stages=["sample"])
    found = _filtered(report)
    assert [one.message.split()[0] for one in found] == [str(expected)] * (expected > 0)
    assert (the_stage(report, "sample").verdict == "diverged") == (expected > 0)


def test_groups_that_are_kept_are_trained_as_any(lake: Lake) -> None:
    report = _step(lake, _samples(), PLAIN)
    assert not _filtered(report)
    assert the_stage(report, "sample").verdict == "pass"


@pytest.mark.parametrize("changes", [DROP, MASK], ids=["drop", "mask"])
def test_a_group_that_is_trained_in_spite_of_its_filter_is_named(
    lake: Lake, changes: dict[str, Any]
) -> None:
    (found,) = _filtered(_step(lake, _samples(), with_changes(PLAIN, changes)))
    verb = {"drop": "consumed", "mask": "trained"}[changes["reward.constant_groups"]]
    assert found.message == (
        f"4 samples of groups of equal raw rewards are {verb}, here of g-1, and "
        f"reward.constant_groups is {changes['reward.constant_groups']!r}"
    )
    assert (found.severity, found.stage, found.sample_id) == ("error", "sample", "s-4")
    (explained,) = [one for one in lake.explain().explanations if one.stage == "sample"]
    assert explained.first is not None
    assert explained.first.faults == ("group.filter",)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "not captured"])
def test_a_group_that_lies_across_steps_is_known_from_its_rollout(
    lake: Lake, captured: bool
) -> None:
    settings, samples = with_changes(PLAIN, DROP), _samples([1.0, 0.0, 0.5, 0.5] * 2)
    samples[4].raw_reward = samples[5].raw_reward = 0.5
    samples[6].raw_reward = 0.0
    _scored(samples, settings)
    if captured:
        write_rollout(lake, {0: samples}, stages=["sample"], settings=settings)
    capture(
        lake,
        {0: samples[4:6]},
        WAY,
        step_id=0,
        stages=["sample"],
        columns=ALL_COLUMNS,
        settings=settings,
    )
    report = the_cohort(lake.replay(), 0, 0)
    if captured:
        assert not _filtered(report)
        assert report.verdict == "pass"
    else:
        (found,) = _filtered(report)
        assert found.severity == "warning"
        assert "is not on record for 2 samples, here of g-1: capture raw_reward" in found.message
        assert report.verdict == "unverified"


@pytest.mark.parametrize("lacking", ["raw_reward", "group_id"])
def test_a_filter_that_cannot_be_checked_is_no_pass(lake: Lake, lacking: str) -> None:
    settings = with_changes(PLAIN, DROP)
    report = _step(lake, _samples(), settings, stages=["sample"], without=[lacking])
    (found,) = _filtered(report)
    assert found.severity == "warning"
    assert report.verdict == "unverified"


@pytest.mark.parametrize("name", BY_BATCH)
def test_statistics_of_a_rollout_leave_out_what_is_dropped(tmp_path: Path, name: str) -> None:
    settings = with_changes(PLAIN, BY_BATCH[name])
    for how in ("keep", "drop"):
        lake, samples = Lake.create(tmp_path / how), _samples()
        _scored(samples[4:], settings)
        _scored(samples[:4], settings)  # without the others
        stated = with_changes(settings, {"reward.constant_groups": how})
        write_rollout(lake, {0: samples}, stages=ROLLOUT_STAGES, settings=stated)
        report = the_cohort(lake.replay(), 0, None)
        assert (report.verdict in ("pass", "precision")) == (how == "drop"), report.stages


@pytest.mark.parametrize("name", BY_BATCH)
def test_a_step_that_consumed_all_but_the_dropped_groups_is_a_whole_batch(
    lake: Lake, name: str
) -> None:
    settings, samples = with_changes(PLAIN, BY_BATCH[name] | DROP), _samples()
    _scored(samples[4:], settings)
    _scored(samples[:4], settings)
    write_rollout(lake, {0: samples}, stages=["sample"], settings=settings)
    report = _step(lake, samples[:4], settings)
    assert report.verdict in ("pass", "precision"), report.stages

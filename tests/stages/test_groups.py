"""Rewards in groups: of another size, cut, moved, constant, or none at all."""

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.composed_rewards import RewardTrainer
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    places,
    refusals,
    the_cohort,
    the_stage,
    write_step,
    write_whole,
)
from tests.helpers.trainer import Trainer
from trajreplay import Lake, with_changes


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_group_of_another_size_than_stated_diverges(lake: Lake, size: int) -> None:
    write_whole(lake, drawn(), replace(WAY, group_size=size))
    report = lake.replay()
    assert diverged(report) == ["reward.post_process"]
    result = the_stage(report, "reward.post_process")
    assert result.message == "8 of 8 samples"
    found = {(one.field, one.group_id, one.recorded, one.recomputed) for one in result.divergences}
    assert found == {("group_size", "g-0", 4.0, size), ("group_size", "g-1", 4.0, size)}


@pytest.mark.parametrize("grouping", ["batch", "consumer-batch"])
def test_prompts_are_counted_where_rewards_are_normalised_over_more(
    lake: Lake, grouping: str
) -> None:
    """That all rewards of a batch share statistics does not say how many a prompt has."""
    changes = {"reward.grouping": grouping, "reward.n_samples_per_prompt": 4}
    settings, samples = with_changes(WAY.full, changes), drawn()
    for one in samples:
        one.consumer_batch_id = "b-0"
    RewardTrainer(with_changes(settings, {"reward.grouping": "batch"}), {0: samples}).score()
    options: dict[str, Any] = {"settings": settings, "stages": ["sample", "reward.post_process"]}
    write_whole(lake, samples, **options)
    assert the_stage(lake.replay(), "reward.post_process").verdict == "pass"
    samples[3].group = "g-1"
    write_whole(lake, samples, step_id=1, **options)
    cohort = the_cohort(Lake.open(lake.path).replay(), step_id=1)
    found = the_stage(cohort, "reward.post_process")
    assert {(one.field, one.group_id, one.recorded) for one in found.divergences} == {
        ("group_size", "g-0", 3.0),
        ("group_size", "g-1", 5.0),
    }


def test_counted_prompts_have_to_be_named(lake: Lake) -> None:
    changes = {"reward.grouping": "batch", "reward.n_samples_per_prompt": 4}
    samples = drawn()
    samples[0].group = None
    stages = ["sample", "reward.post_process"]
    write_whole(lake, samples, settings=with_changes(WAY.full, changes), stages=stages)
    assert "input group_id is missing for 1 of 8 samples" in refusals(lake.replay())


def test_a_sample_moved_to_another_group_diverges_at_both(lake: Lake) -> None:
    samples = drawn()
    samples[3].group = "g-1"
    write_whole(lake, samples)
    report = lake.replay()
    assert report.first_divergent_stage == "reward.post_process"
    groups = {one.group_id for one in the_stage(report, "reward.post_process").divergences}
    assert groups == {"g-0", "g-1"}
    assert the_stage(report, "reward.post_process").message == "8 of 8 samples"


def test_groups_of_unstated_size_may_have_any(lake: Lake) -> None:
    way = replace(WAY, group_size=None)
    samples = drawn(way)[:5]
    Trainer(way).score(samples)
    Trainer(way).estimate(samples)
    write_whole(lake, samples, way)
    assert lake.replay().verdict == "pass"


def test_a_group_known_to_have_had_more_members_is_refused(lake: Lake) -> None:
    samples = drawn()
    for one in samples:
        one.group_size = 4
    write_whole(lake, samples)
    samples[5].group_size = 5
    write_whole(lake, samples, step_id=1)
    report = lake.replay()
    assert the_cohort(report, step_id=0).verdict == "pass"
    short = the_cohort(report, step_id=1)
    assert short.verdict == "refused"
    assert "group 'g-1': 4 of 5 members were captured" in refusals(short)


def test_a_step_that_cuts_through_groups_is_judged_if_it_normalises_none(lake: Lake) -> None:
    samples = drawn()
    for one in samples:
        one.group_size = 4
    write_step(lake, samples[:3])
    assert lake.replay().verdict == "pass"


@pytest.mark.parametrize("missing", [[2], range(8)])
def test_a_sample_without_a_group_is_refused_where_one_is_needed(
    lake: Lake, missing: list[int]
) -> None:
    samples = drawn()
    for row in missing:
        samples[row].group = None
    write_whole(lake, samples)
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "reward.post_process" in refusals(cohort)
    assert "group_id" in refusals(cohort)


def test_without_grouping_no_group_is_needed_and_rewards_are_used_as_given(lake: Lake) -> None:
    way = replace(WAY, grouped=False, group_size=None)
    samples = drawn(way)
    for one in samples:
        one.group = None
    write_whole(lake, samples, way)
    samples[6].reward = 0.5
    Trainer(way).estimate(samples)
    write_whole(lake, samples, way, step_id=1)
    report = lake.replay()
    assert the_cohort(report, step_id=0).verdict == "pass"
    wrong = the_stage(the_cohort(report, step_id=1), "reward.post_process")
    assert places(wrong) == {("reward", "s-6", None)}


def test_a_constant_group_is_called_precision_with_a_warning(lake: Lake) -> None:
    samples = drawn()
    for one in samples[:4]:
        one.raw_reward = 0.1
    trainer = Trainer(WAY, "loop")
    trainer.score(samples)
    samples[0].reward = samples[1].reward = samples[2].reward = samples[3].reward = 7.4e-3
    trainer.estimate(samples)
    write_whole(lake, samples)
    report = lake.replay()
    assert the_stage(report, "reward.post_process").verdict == "precision"
    (warning,) = (one for one in report.cohorts[0].findings if one.severity == "warning")
    assert warning.check == "group.constant"
    assert report.exit_code == 0


def test_a_constant_group_may_not_be_off_by_more_than_float32_can(lake: Lake) -> None:
    samples = drawn()
    for one in samples[:4]:
        one.raw_reward = 0.1
        one.reward = 0.5
    Trainer(WAY).estimate(samples)
    write_whole(lake, samples)
    assert diverged(lake.replay())[0] == "reward.post_process"

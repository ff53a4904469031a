"""Selected samples, micro-batches, ranks and steps, and what closes over them."""

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.cohorts import ALL_STAGES, STEP_STAGES, Expected, rank_sums, terms
from tests.helpers.recordings import RECORDINGS
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    halves,
    places,
    the_cohort,
    the_stage,
    verdicts,
    write_rollout,
    write_step,
    write_whole,
)
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake, QueryError

TRAINER = Trainer(WAY)


def _two_rollouts(lake: Lake) -> list[Sample]:
    first, second = drawn(rollout_id=0), drawn(rollout_id=1)
    write_rollout(lake, first)
    write_rollout(lake, second)
    return [*first, *second]


def test_a_sample_is_replayed_with_its_group(lake: Lake) -> None:
    write_whole(lake, drawn())
    report = lake.replay(samples=["s-5"])
    assert the_stage(report, "reward.post_process").compared == 4
    assert verdicts(report)["loss.policy"] == "skipped"
    assert "--closure cohort" in the_stage(report, "loss.policy").message
    assert report.verdict == "pass"


def test_a_fault_outside_the_closure_is_not_seen_and_one_inside_is(lake: Lake) -> None:
    samples = drawn()
    samples[1].reward = float(samples[1].reward or 0.0) + 1.0
    TRAINER.estimate(samples)
    write_whole(lake, samples)
    assert lake.replay(samples=["s-5"]).verdict == "pass"
    found = the_stage(lake.replay(samples=["s-2"]), "reward.post_process")
    assert places(found) == {("reward", "s-1", None)}


def test_the_closure_of_a_cohort_is_the_cohort(lake: Lake) -> None:
    write_whole(lake, drawn())
    report = lake.replay(samples=["s-5"], closure="cohort")
    assert the_stage(report, "reward.post_process").compared == 8
    assert verdicts(report)["loss.policy"] == "pass"


def test_groups_that_are_together_the_cohort_are_the_cohort(lake: Lake) -> None:
    write_whole(lake, drawn())
    report = lake.replay(groups=["g-0", "g-1"])
    assert verdicts(report)["loss.policy"] == "pass"


def test_a_sample_of_its_own_loss_is_checked_without_the_cohort(lake: Lake) -> None:
    shares = halves(drawn())
    expected = RECORDINGS["sample"](TRAINER, shares)
    write_whole(lake, dict(shares), settings=WAY.full, expected=expected)
    assert verdicts(lake.replay(samples=["s-5"]))["loss.policy"] == "pass"
    values = {name: list(one) for name, one in expected[1][0].values.items()}
    values["loss"][3] += 1.0
    wrong = {0: expected[0], 1: [replace(expected[1][0], values=values)]}
    write_whole(lake, dict(shares), step_id=1, settings=WAY.full, expected=wrong)
    lake.refresh()
    inside = lake.replay(samples=["s-5"], steps=[(0, 1)])
    assert places(the_stage(inside, "loss.policy")) == {("loss", "s-7", None)}
    outside = lake.replay(samples=["s-1"], steps=[(0, 1)])
    assert verdicts(outside)["loss.policy"] == "pass"


def test_per_sample_losses_of_another_rank_only_leave_a_sample_unchecked(lake: Lake) -> None:
    samples = drawn()
    shares = {0: samples[:4], 1: samples[4:]}
    expected = RECORDINGS["sample"](TRAINER, shares)
    expected[0] = RECORDINGS["sum"](TRAINER, shares)[0]
    write_whole(lake, shares, settings=WAY.full, expected=expected, stages=STEP_STAGES)
    assert verdicts(lake.replay(samples=["s-5"]))["loss.policy"] == "pass"
    found = lake.replay(samples=["s-1"])
    assert verdicts(found)["loss.policy"] == "skipped"


def _batches(lake: Lake, **options: Any) -> None:
    """Two ranks, each with a micro-batch a group."""
    samples = drawn()
    for one in samples:
        one.micro_batch_id = "mb-0000" if one.group == "g-0" else "mb-0001"
    shares = halves(samples)
    expected = RECORDINGS["micro"](TRAINER, shares)
    if options:
        last = expected[1][1]
        expected[1][1] = replace(last, values={**last.values, **options})
    write_whole(lake, dict(shares), settings=WAY.full, expected=expected)


def test_a_micro_batch_is_checked_on_every_rank_without_the_cohort(lake: Lake) -> None:
    _batches(lake)
    report = lake.replay(steps=[(0, 0)], batches=["mb-0001"])
    assert the_stage(report, "reward.post_process").compared == 4
    loss = the_stage(report, "loss.policy")
    assert (loss.verdict, loss.compared) == ("pass", 10)


def test_a_wrong_loss_of_a_micro_batch_is_found_there_only(lake: Lake) -> None:
    _batches(lake, loss=9.0)
    wrong = the_stage(lake.replay(steps=[(0, 0)], batches=["mb-0001"]), "loss.policy")
    assert {(one.field, one.rank) for one in wrong.divergences} == {("loss[mb-0001]", 1)}
    right = lake.replay(steps=[(0, 0)], batches=["mb-0000"])
    assert verdicts(right)["loss.policy"] == "pass"


def test_a_micro_batch_of_half_a_group_brings_the_other_half_along(lake: Lake) -> None:
    shares = halves(drawn())
    expected = RECORDINGS["micro"](TRAINER, shares)
    write_whole(lake, dict(shares), settings=WAY.full, expected=expected)
    report = lake.replay(steps=[(0, 0)], batches=["mb-0000"], ranks=[0])
    assert the_stage(report, "reward.post_process").compared == 8
    assert verdicts(report)["loss.policy"] == "pass"


def test_a_rank_is_replayed_with_the_groups_that_it_shares(lake: Lake) -> None:
    write_whole(lake, drawn())
    report = lake.replay(ranks=[1])
    assert the_stage(report, "reward.post_process").compared == 8
    cut = {0: drawn()[:4], 1: drawn()[4:]}
    write_whole(lake, cut, step_id=1)
    lake.refresh()
    only = lake.replay(ranks=[1], steps=[(0, 1)])
    assert the_stage(only, "reward.post_process").compared == 4
    assert verdicts(only)["loss.policy"] == "skipped"


def test_a_rank_does_not_bypass_completeness(lake: Lake) -> None:
    write_whole(lake, {0: halves(drawn())[0]}, ranks=[0, 1])
    assert lake.replay(ranks=[0]).verdict == "refused"


def test_an_asked_stage_that_is_skipped_is_no_pass(lake: Lake) -> None:
    write_whole(lake, drawn())
    report = lake.replay(samples=["s-5"], stages=["loss.policy"])
    assert (report.verdict, report.exit_code) == ("unverified", 3)


def test_a_stage_that_is_asked_for_is_judged_alone(lake: Lake) -> None:
    samples = drawn()
    samples[0].columns["kl"][0] += 1.0
    write_whole(lake, samples)
    report = lake.replay(stages=["loss.policy", "reward.post_process"])
    assert verdicts(report) == {"reward.post_process": "pass", "loss.policy": "pass"}
    assert diverged(lake.replay(stages=["advantage.kl"])) == ["advantage.kl"]


def test_a_selected_sample_with_no_group_is_refused(lake: Lake) -> None:
    samples = drawn()
    samples[5].group = None
    write_whole(lake, samples, stages=STEP_STAGES)
    report = lake.replay(samples=["s-5"])
    assert report.verdict == "refused"
    assert lake.replay(samples=["s-5"], closure="cohort").verdict == "pass"


@pytest.mark.parametrize(
    "selection",
    [
        {"samples": ["s-99"]},
        {"groups": ["g-9"]},
        {"rollouts": [7]},
        {"steps": [(0, 9)]},
        {"steps": [(0, 0)], "batches": ["mb-9999"]},
        {"where": "reward > 1e9"},
        {"run": "other"},
        {"ranks": [5]},
    ],
)
def test_what_selects_nothing_is_an_error_and_no_pass(
    lake: Lake, selection: dict[str, Any]
) -> None:
    write_whole(lake, drawn())
    with pytest.raises(QueryError):
        lake.replay(**selection)


def test_an_empty_lake_has_nothing_to_replay(lake: Lake) -> None:
    with pytest.raises(QueryError):
        lake.replay()


def test_a_step_is_judged_with_the_rollouts_that_it_consumed_from(lake: Lake) -> None:
    samples = _two_rollouts(lake)
    for one in samples[:8]:
        one.columns["old_log_probs"] = one.columns["old_log_probs"] + 0.5
    write_step(lake, samples, rollout_id=1)
    report = lake.replay(steps=[(1, 0)])
    step = the_cohort(report, 1, 0)
    assert diverged(step) == ["sample"]
    named = the_stage(step, "sample").divergences
    assert {one.sample_id for one in named} <= {f"s-{row}" for row in range(8)}


def test_a_step_that_is_selected_alone_says_what_its_rollouts_found(lake: Lake) -> None:
    first, second = drawn(rollout_id=0), drawn(rollout_id=1)
    for one in second:
        one.reward = one.raw_reward
    TRAINER.estimate(second)
    write_rollout(lake, first)
    write_rollout(lake, second)
    write_step(lake, [*first, *second], rollout_id=1)
    write_step(lake, first, rollout_id=1, step_id=1)
    (step,) = lake.replay(steps=[(1, 0)]).cohorts
    assert step.first_divergent_stage == "reward.post_process"
    assert "rollout 1" in the_stage(step, "reward.post_process").message
    assert the_stage(step, "loss.policy").inherited
    (other,) = lake.replay(steps=[(1, 1)]).cohorts
    assert other.verdict == "pass"
    assert verdicts(other) == dict.fromkeys(ALL_STAGES, "pass")


def test_a_lake_of_several_runs_keeps_them_apart(lake: Lake) -> None:
    samples = drawn()
    wrong = [one.copy() for one in samples]
    wrong[0].columns["kl"][0] += 1.0
    shares = halves(wrong)
    write_whole(lake, samples, run_id="b")
    write_whole(lake, dict(shares), run_id="a", expected=rank_sums(TRAINER, shares))
    report = lake.replay()
    assert [(one.run_id, one.verdict) for one in report.cohorts] == [
        ("a", "diverged"),
        ("b", "pass"),
    ]
    assert lake.replay(run="b").verdict == "pass"


def test_a_rank_without_rows_belongs_to_its_cohort(lake: Lake) -> None:
    samples = drawn()
    meaning = {"scope": "global", "reduction": "sum"}
    expected = {2: [Expected(terms(TRAINER, samples), meaning)]}
    write_whole(lake, {0: samples[:5], 1: samples[5:], 2: []}, expected=expected)
    report = lake.replay()
    assert report.verdict == "pass"
    assert report.cohorts[0].ranks == [0, 1, 2]

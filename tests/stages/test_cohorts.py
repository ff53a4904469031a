"""Who belongs to a cohort: copies, ranks, attempts, selections and their closures."""

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.cohorts import ALL_STAGES, STEP_STAGES, Expected, rank_sums, terms
from tests.helpers.healthy import RECORDINGS
from tests.helpers.mutate import change_value
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    halves,
    places,
    refusals,
    step_key,
    the_cohort,
    the_stage,
    verdicts,
    write_rollout,
    write_step,
    write_whole,
)
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake, ParallelCoordinates, QueryError

TRAINER = Trainer(WAY)


def _two_rollouts(lake: Lake) -> list[Sample]:
    first, second = drawn(rollout_id=0), drawn(rollout_id=1)
    write_rollout(lake, first)
    write_rollout(lake, second)
    return [*first, *second]


# Two rollouts in one step.


def test_groups_and_samples_of_one_name_from_two_rollouts_are_two(lake: Lake) -> None:
    samples = [*drawn(rollout_id=0), *drawn(rollout_id=1)]
    write_whole(lake, samples, rollout_id=1)
    assert lake.replay().verdict == "pass"


def test_rewards_normalised_over_two_rollouts_groups_of_one_name_diverge(lake: Lake) -> None:
    samples = [*drawn(rollout_id=0), *drawn(rollout_id=1)]
    merged = [one.copy() for one in samples]
    for one in merged:
        one.rollout_id = 0
    TRAINER.score(merged)
    for one, other in zip(samples, merged, strict=True):
        one.reward = other.reward
    TRAINER.estimate(samples)
    write_whole(lake, samples, rollout_id=1)
    assert lake.replay().first_divergent_stage == "reward.post_process"


def test_the_same_sample_twice_from_one_rollout_is_refused(lake: Lake) -> None:
    samples = drawn()
    twin = samples[0].copy()
    place = ParallelCoordinates()
    write_whole(lake, {0: samples, 1: [twin]}, parallel={0: place, 1: place})
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "'s-0'" in refusals(cohort)


# Tensor-parallel copies.


def _copies(lake: Lake, copy: list[Sample], step_id: int = 0) -> None:
    shares = {0: drawn(), 1: copy}
    parallel = {rank: ParallelCoordinates(0, 1, rank, 2) for rank in shares}
    expected = dict.fromkeys(shares, rank_sums(TRAINER, shares)[0])
    write_whole(lake, shares, parallel=parallel, step_id=step_id, expected=expected)


def test_equal_copies_are_counted_once(lake: Lake) -> None:
    _copies(lake, drawn())
    report = lake.replay()
    assert report.verdict == "pass"
    assert the_stage(report, "reward.post_process").compared == 8
    assert report.cohorts[0].ranks == [0, 1]


@pytest.mark.parametrize(
    ("column", "stage"),
    [("kl", "advantage.kl"), ("advantages", "advantage.estimate"), ("log_probs", "sample")],
)
def test_an_unequal_copy_diverges_at_the_stage_of_its_column(
    lake: Lake, column: str, stage: str
) -> None:
    copy = drawn()
    copy[2].columns[column][0] += 1e-7
    _copies(lake, copy)
    report = lake.replay()
    assert diverged(report) == [stage]
    (finding,) = (one for one in report.cohorts[0].findings if one.check == "copy")
    assert finding.severity == "error"
    assert f"rank 1 is a copy of rank 0 and differs in {column}" in finding.message


def test_a_copy_that_recorded_another_loss_diverges(lake: Lake) -> None:
    shares = {0: drawn(), 1: drawn()}
    parallel = {rank: ParallelCoordinates(0, 1, rank, 2) for rank in shares}
    expected = rank_sums(TRAINER, shares)
    other = {**expected[1][0].values, "ppo_kl": 9.0}
    expected[1] = [replace(expected[1][0], values=other)]
    write_whole(lake, shares, parallel=parallel, expected=expected)
    report = lake.replay()
    assert diverged(report) == ["loss.policy"]
    finding = next(one for one in report.cohorts[0].findings if one.check == "copy")
    assert "recorded another ppo_kl: 9.0" in finding.message


def test_a_copy_may_leave_the_scalars_to_its_owner(lake: Lake) -> None:
    shares = {0: drawn(), 1: drawn()}
    parallel = {rank: ParallelCoordinates(0, 1, rank, 2) for rank in shares}
    expected = {0: rank_sums(TRAINER, shares)[0]}
    write_whole(lake, shares, parallel=parallel, expected=expected)
    assert lake.replay().verdict == "pass"


def test_a_scalar_that_is_no_number_on_owner_and_copy_is_no_difference_of_theirs(
    lake: Lake,
) -> None:
    shares = {0: drawn(), 1: drawn()}
    parallel = {rank: ParallelCoordinates(0, 1, rank, 2) for rank in shares}
    unstated = [Expected({"grad_norm": float("nan")})]
    expected = {rank: [*calls, *unstated] for rank, calls in rank_sums(TRAINER, shares).items()}
    write_whole(lake, shares, parallel=parallel, expected=expected)
    assert {one.check for one in lake.replay().cohorts[0].findings} == {"handoff"}


def test_a_copy_with_other_samples_diverges(lake: Lake) -> None:
    _copies(lake, drawn()[:7])
    assert diverged(lake.replay())[0] == "sample"


def test_a_copy_without_its_owner_is_refused(lake: Lake) -> None:
    parallel = {1: ParallelCoordinates(0, 1, 1, 2)}
    write_whole(lake, {1: drawn()}, parallel=parallel)
    assert lake.replay().verdict == "refused"


# Missing and extra ranks.


def test_a_missing_rank_is_refused_and_named(lake: Lake) -> None:
    shares = halves(drawn())
    write_whole(lake, {0: shares[0]}, ranks=[0, 1])
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "no capture of rank 1, expected ranks 0, 1" in refusals(cohort)


def test_what_is_there_of_an_incomplete_cohort_is_at_best_unverified(lake: Lake) -> None:
    shares = {0: drawn()[:4], 1: drawn()[4:]}
    write_whole(lake, {0: shares[0]}, ranks=[0, 1])
    report = lake.replay(allow_partial=True)
    assert (report.verdict, report.exit_code) == ("unverified", 3)
    assert set(verdicts(report).values()) == {"pass"}
    change_value(lake, step_key(0), "kl", 0, lambda value: value + 1.0, 0)
    assert lake.replay(allow_partial=True).verdict == "diverged"


def test_a_group_that_a_missing_rank_cut_is_not_called_diverged(lake: Lake) -> None:
    shares = halves(drawn())
    write_whole(lake, {0: shares[0]}, ranks=[0, 1])
    report = lake.replay(allow_partial=True)
    assert diverged(report) == []
    assert report.verdict == "unverified"
    result = the_stage(report, "reward.post_process")
    assert result.verdict == "skipped"
    assert "2 of 4 members were captured" in result.message
    assert verdicts(report)["advantage.estimate"] == "pass"


@pytest.mark.parametrize("known", [True, False])
def test_groups_of_an_incomplete_cohort_are_judged_if_they_are_known_to_be_whole(
    lake: Lake, known: bool
) -> None:
    way = replace(WAY, group_size=None)
    samples = drawn(way)[:4]
    for one in samples:
        one.group_size = 4 if known else None
    write_whole(lake, {0: samples}, way, ranks=[0, 1])
    report = lake.replay(allow_partial=True)
    assert verdicts(report)["reward.post_process"] == ("pass" if known else "skipped")


def test_a_group_without_all_its_members_is_no_matter_where_rewards_are_used_as_given(
    lake: Lake,
) -> None:
    way = replace(WAY, grouped=False, group_size=None)
    samples = drawn(way)
    for one in samples:
        one.group_size = 9
    write_whole(lake, samples, way)
    assert lake.replay().verdict == "pass"


def test_a_scalar_over_all_ranks_is_not_held_against_some(lake: Lake) -> None:
    shares = {0: drawn()[:4], 1: drawn()[4:]}
    expected = RECORDINGS["global"](TRAINER, shares)
    write_whole(lake, {0: shares[0]}, ranks=[0, 1], expected=expected)
    report = lake.replay(allow_partial=True)
    assert diverged(report) == []
    assert verdicts(report)["loss.policy"] == "unverified"


def test_ranks_that_expect_others_are_refused(lake: Lake) -> None:
    shares = halves(drawn())
    write_whole(lake, {0: shares[0]}, ranks=[0, 1])
    write_whole(lake, {1: shares[1]}, ranks=[1, 2])
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "rank 0 expects the ranks 0, 1, rank 1 expects 1, 2" in refusals(cohort)


def test_a_cohort_known_to_have_more_samples_is_refused(lake: Lake) -> None:
    write_whole(lake, drawn(), cohort_size=9)
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "8 samples were captured, expected cohort_size 9" in refusals(cohort)


def test_a_dropped_capture_is_no_capture(lake: Lake) -> None:
    shares = halves(drawn())
    write_whole(lake, {0: shares[0]}, ranks=[0, 1])
    with lake.capture(
        run_id="r",
        rollout_id=0,
        step_id=0,
        rank=1,
        expected_ranks=[0, 1],
        settings=WAY.short,
        stages=STEP_STAGES,
    ) as capture:
        capture.drop("queue full")
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "rank 1 dropped its capture" in refusals(cohort)


# Attempts.


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


# Selections and their closures.


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

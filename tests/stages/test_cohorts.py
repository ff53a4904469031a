"""Who belongs to a cohort: rollouts in one step, parallel copies, missing and extra ranks."""

from dataclasses import replace

import pytest

from tests.helpers.cohorts import STEP_STAGES, Expected, rank_sums
from tests.helpers.mutate import change_value, data_file
from tests.helpers.recordings import RECORDINGS
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    halves,
    refusals,
    step_key,
    the_cohort,
    the_stage,
    verdicts,
    write_whole,
)
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake, ParallelCoordinates

TRAINER = Trainer(WAY)


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


@pytest.mark.parametrize("same", [True, False])
def test_pipeline_stages_with_the_same_samples_are_counted_once(lake: Lake, same: bool) -> None:
    """The last one computes the loss; an earlier one knows the samples, and no log-probs."""
    shares = {0: drawn(), 1: drawn()}
    for one in shares[0]:
        one.columns = {name: one.columns[name] for name in ("ref_log_probs", "kl")}
    if not same:
        shares[0][2].columns["kl"][0] += 1e-7
    parallel = {rank: ParallelCoordinates(pipeline_rank=rank, pipeline_size=2) for rank in shares}
    expected = {1: rank_sums(TRAINER, {1: shares[1]})[1]}
    write_whole(lake, shares, parallel=parallel, expected=expected)
    report = lake.replay()
    assert diverged(report) == ([] if same else ["advantage.kl"])
    assert the_stage(report, "reward.post_process").compared == 8
    copies = [one.message for one in report.cohorts[0].findings if one.check == "copy"]
    assert copies == ([] if same else ["rank 0 is a copy of rank 1 and differs in kl"])


def test_samples_that_are_there_twice_are_refused_with_what_to_state(lake: Lake) -> None:
    parallel = dict.fromkeys((0, 1), ParallelCoordinates())
    write_whole(lake, {0: drawn(), 1: drawn()}, parallel=parallel)
    assert "there twice, first 's-0'" in refusals(lake.replay())
    assert "states its tensor and pipeline rank, or owner=False" in refusals(lake.replay())


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
    assert {one.check for one in lake.replay().cohorts[0].findings} == {
        "handoff",
        "outputs.not-compared",
    }


def test_a_copy_with_other_samples_diverges(lake: Lake) -> None:
    _copies(lake, drawn()[:7])
    assert diverged(lake.replay())[0] == "sample"


def test_a_copy_whose_file_is_gone_or_damaged_is_refused(lake: Lake) -> None:
    _copies(lake, drawn())
    path = data_file(lake, step_key(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert lake.replay().verdict == "refused"
    path.unlink()
    lake.refresh()
    assert lake.replay().verdict == "refused"


def test_a_copy_without_its_owner_is_refused(lake: Lake) -> None:
    parallel = {1: ParallelCoordinates(0, 1, 1, 2)}
    write_whole(lake, {1: drawn()}, parallel=parallel)
    assert lake.replay().verdict == "refused"


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

from dataclasses import replace

import pytest
import torch

from tests.helpers.cohorts import STEP_COLUMNS, rank_sums
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    halves,
    places,
    refusals,
    the_cohort,
    the_stage,
    verdicts,
    write_rollout,
    write_step,
    write_whole,
)
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake

ROLLOUT = {"rollout_id": 0, "step_id": None}


def _shifted(mask: list[int]) -> list[int]:
    return [0, *mask[:-1]]


def _masks_shifted(samples: list[Sample]) -> list[Sample]:
    found = [one.copy() for one in samples]
    for one in found:
        one.mask = _shifted(one.mask)
    return found


def test_what_a_step_took_over_unchanged_passes(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    write_step(lake, samples)
    report = lake.replay()
    assert report.verdict == "pass"
    assert report.first_divergent_stage is None
    loss = the_stage(the_cohort(report), "loss.policy")
    assert (loss.isolated, loss.chained, loss.inherited) == ("pass", "pass", False)


def test_a_loss_that_consumed_a_shifted_mask_shows_at_the_handoff(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    write_step(lake, _masks_shifted(samples))
    report = lake.replay()
    step = the_cohort(report)
    assert report.first_divergent_stage == "sample"
    assert diverged(step) == ["sample"]
    first = min(row for row, one in enumerate(samples) if _shifted(one.mask) != one.mask)
    finding = next(one for one in step.findings if one.check == "handoff.loss_mask")
    assert finding.severity == "error"
    assert finding.sample_id == f"s-{first}"
    assert finding.token == 0
    loss = the_stage(step, "loss.policy")
    assert (loss.isolated, loss.chained, loss.inherited) == ("pass", "diverged", True)


def test_a_loss_against_stale_log_probs_shows_at_the_handoff(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    stale = [one.copy() for one in samples]
    for one in stale:
        one.columns["old_log_probs"] = one.columns["old_log_probs"] + 0.25
    write_step(lake, stale)
    report = lake.replay()
    step = the_cohort(report)
    assert report.first_divergent_stage == "sample"
    result = the_stage(step, "sample")
    assert result.mismatches == len(samples)
    assert {one.field for one in result.divergences} == {"handoff.old_log_probs"}
    assert the_stage(step, "loss.policy").inherited


@pytest.mark.parametrize("column", ["rollout_log_probs", "old_log_probs", "advantages"])
def test_one_changed_token_is_named(lake: Lake, column: str) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    changed = [one.copy() for one in samples]
    changed[4].columns[column][2] += 2.0**-20
    write_step(lake, changed)
    result = the_stage(the_cohort(lake.replay()), "sample")
    assert result.verdict == "diverged"
    assert places(result) == {(f"handoff.{column}", "s-4", 2)}


def test_a_changed_reward_and_a_changed_group_are_named(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    changed = [one.copy() for one in samples]
    changed[3].reward = 7.0
    changed[5].group = "g-9"
    write_step(lake, changed)
    step = the_cohort(lake.replay())
    assert diverged(step) == ["sample"]
    found = {(one.check, one.sample_id) for one in step.findings}
    assert found == {("handoff.reward", "s-3"), ("handoff.group_id", "s-5")}


def test_a_nan_that_was_handed_over_as_it_is_agrees(lake: Lake) -> None:
    samples = drawn()
    masked = next(one for one in samples if 0 in one.mask)
    masked.columns["old_log_probs"][masked.mask.index(0)] = torch.nan
    way = replace(WAY, kl_coef=0.0)
    for one in samples:
        one.columns["kl"] = torch.zeros(one.length)
    write_rollout(lake, samples, way)
    write_step(lake, samples, way, expected=None, stages=["sample"])
    step = the_cohort(lake.replay())
    assert verdicts(step) == {"sample": "pass"}


@pytest.mark.parametrize(
    ("how", "change"),
    [
        ("masked", lambda one: one.columns["old_log_probs"] * torch.tensor(one.mask)),
        ("bfloat16", lambda one: one.columns["old_log_probs"].bfloat16()),
        ("float16", lambda one: one.columns["old_log_probs"].half()),
        ("recomputed", lambda one: one.columns["old_log_probs"] - 0.01),
    ],
)
def test_a_declared_transformation_is_no_alarm(lake: Lake, how: str, change: object) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    changed = [one.copy() for one in samples]
    for one in changed:
        one.columns["old_log_probs"] = change(one)  # type: ignore[operator]
    declared = replace(WAY.full, handoff={"old_log_probs": how})
    write_step(lake, changed, settings=declared)
    write_step(lake, changed, step_id=1, settings=WAY.full)
    report = lake.replay()
    assert the_cohort(report, step_id=0).verdict == "pass"
    assert diverged(the_cohort(report, step_id=1)) == ["sample"]


@pytest.mark.parametrize("how", ["masked", "bfloat16"])
def test_a_declared_transformation_covers_nothing_else(lake: Lake, how: str) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    changed = [one.copy() for one in samples]
    if how == "bfloat16":
        for one in changed:
            one.columns["old_log_probs"] = one.columns["old_log_probs"].bfloat16()
    changed[0].columns["old_log_probs"][1] -= 0.5
    write_step(lake, changed, settings=replace(WAY.full, handoff={"old_log_probs": how}))
    result = the_stage(the_cohort(lake.replay()), "sample")
    assert result.verdict == "diverged"
    assert ("handoff.old_log_probs", "s-0", 1) in places(result)


def test_a_reward_rounded_as_declared_is_no_alarm(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    changed = [one.copy() for one in samples]
    for one in changed:
        one.reward = float(torch.tensor(one.reward).bfloat16())
    write_step(lake, changed, settings=replace(WAY.full, handoff={"reward": "bfloat16"}))
    write_step(lake, changed, step_id=1)
    report = lake.replay()
    assert the_cohort(report, step_id=0).verdict == "pass"
    assert diverged(the_cohort(report, step_id=1)) == ["sample"]


def test_handoffs_from_a_rollout_that_is_not_there_are_listed_and_change_nothing(
    lake: Lake,
) -> None:
    samples = drawn(rollout_id=3)
    write_step(lake, samples)
    report = lake.replay()
    step = the_cohort(report)
    assert verdicts(step) == {"sample": "pass", "loss.policy": "pass"}
    (finding,) = step.findings
    assert (finding.check, finding.severity) == ("handoff", "info")
    assert "rollout 3 is not in the lake" in finding.message
    assert the_stage(step, "loss.policy").chained is None


@pytest.mark.parametrize("trained", [False, True])
def test_a_rollout_under_an_attempt_of_its_own_is_no_pass(lake: Lake, trained: bool) -> None:
    """A driver and trainers that took different attempts: nothing of a handoff was compared."""
    samples = drawn()
    write_rollout(lake, samples, attempt=1)
    if trained:  # another training of the run, which is compared with its own rollouts
        write_step(lake, samples, attempt=1, step_id=7)
    write_step(lake, _masks_shifted(samples))
    report = lake.replay(attempt=0)
    step = the_cohort(report)
    (finding,) = [one for one in step.findings if one.check == "handoff"]
    assert "rollout 0 is not in attempt 0, and is in attempt 1" in finding.message
    assert finding.severity == ("info" if trained else "warning")
    assert the_stage(step, "sample").verdict == ("pass" if trained else "unverified")
    assert report.verdict == ("pass" if trained else "unverified")
    assert trained or lake.replay().verdict == "unverified"


def test_a_step_whose_rollout_is_there_and_incomplete_is_refused(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, {0: samples[::2]}, ranks=[0, 1])
    changed = [one.copy() for one in samples]
    changed[0].mask = [0] * changed[0].length
    write_step(lake, changed)
    report = lake.replay()
    assert the_cohort(report, step_id=None).verdict == "refused"
    step = the_cohort(report)
    assert step.verdict == "refused"
    assert "no capture of rank 1" in step.refusal


def test_a_consumed_sample_that_its_rollout_does_not_hold_diverges(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    stranger = samples[0].copy()
    stranger.sample_id = "s-99"
    write_step(lake, [*samples, stranger])
    step = the_cohort(lake.replay())
    assert diverged(step) == ["sample"]
    (finding,) = step.findings
    assert (finding.check, finding.sample_id) == ("handoff.sample_id", "s-99")


def test_samples_of_one_id_from_two_rollouts_are_each_held_against_their_own(lake: Lake) -> None:
    first, second = drawn(rollout_id=0), drawn(rollout_id=1)
    write_rollout(lake, first)
    write_rollout(lake, second)
    write_step(lake, [*first, *second], rollout_id=1)
    changed = [one.copy() for one in second]
    changed[2].columns["advantages"][0] = 9.0
    write_step(lake, [*first, *changed], rollout_id=1, step_id=1)
    report = lake.replay()
    assert the_cohort(report, 1, 0).verdict == "pass"
    result = the_stage(the_cohort(report, 1, 1), "sample")
    assert places(result) == {("handoff.advantages", "s-2", 0)}
    (divergence,) = result.divergences
    assert divergence.recomputed == second[2].reward


def test_a_step_reads_what_it_lacks_from_its_rollouts(lake: Lake) -> None:
    first, second = drawn(rollout_id=0), drawn(rollout_id=1)
    write_rollout(lake, first)
    write_rollout(lake, second)
    lean = [name for name in STEP_COLUMNS if name not in ("advantages", "old_log_probs")]
    mixed = [*second[:4], *first, *second[4:]]
    write_step(lake, mixed, rollout_id=1, columns=lean)
    assert the_cohort(lake.replay(), 1, 0).verdict == "pass"


def test_a_step_that_lacks_an_input_is_refused_without_its_rollout(lake: Lake) -> None:
    samples = drawn()
    write_step(lake, samples, columns=["old_log_probs", "log_probs", "entropy"])
    step = the_cohort(lake.replay())
    assert step.verdict == "refused"
    assert "input advantages is missing" in refusals(step)


def test_a_fault_of_the_rollout_is_inherited_by_its_steps_and_named_once(lake: Lake) -> None:
    samples = drawn()
    for one in samples:
        one.reward = one.raw_reward - 0.5
    trainer = Trainer(WAY)
    trainer.estimate(samples)
    write_rollout(lake, samples)
    write_step(lake, samples)
    report = lake.replay()
    rollout, step = the_cohort(report, step_id=None), the_cohort(report)
    assert report.first_divergent_stage == "reward.post_process"
    assert diverged(rollout) == ["reward.post_process"]
    estimate = the_stage(rollout, "advantage.estimate")
    assert (estimate.isolated, estimate.chained) == ("pass", "diverged")
    assert estimate.inherited
    assert step.verdict == "pass"
    loss = the_stage(step, "loss.policy")
    assert (loss.isolated, loss.chained, loss.inherited) == ("pass", "diverged", True)


def test_advantages_overwritten_after_the_loss_are_a_suspect_intermediate(lake: Lake) -> None:
    samples = drawn()
    shares = halves(samples)
    expected = rank_sums(Trainer(WAY), shares)
    for one in samples:
        one.columns["advantages"] = one.columns["advantages"] * 3.0
    write_whole(lake, samples, expected=expected)
    report = lake.replay()
    assert report.first_divergent_stage == "advantage.estimate"
    estimate, loss = the_stage(report, "advantage.estimate"), the_stage(report, "loss.policy")
    assert (loss.isolated, loss.chained) == ("diverged", "pass")
    assert loss.suspect == estimate.suspect == "recorded-intermediate"
    assert "advantage.estimate" in loss.message


def test_a_reward_overwritten_after_its_use_is_a_suspect_intermediate(lake: Lake) -> None:
    samples = drawn()
    for one in samples[:4]:
        one.reward = 2.0 * float(one.reward or 0.0)
    write_whole(lake, samples)
    report = lake.replay()
    assert report.first_divergent_stage == "reward.post_process"
    process, estimate = (
        the_stage(report, "reward.post_process"),
        the_stage(report, "advantage.estimate"),
    )
    assert (estimate.isolated, estimate.chained) == ("diverged", "pass")
    assert process.suspect == estimate.suspect == "recorded-intermediate"
    assert the_stage(report, "loss.policy").verdict == "pass"


def test_log_probs_overwritten_after_the_loss_are_named_at_the_handoff(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    shares = halves(samples)
    expected = rank_sums(Trainer(WAY), shares)
    changed = [one.copy() for one in samples]
    for one in changed:
        one.columns["old_log_probs"] = one.columns["log_probs"].clone()
    write_step(lake, changed, expected=expected)
    report = lake.replay()
    step = the_cohort(report)
    assert report.first_divergent_stage == "sample"
    loss = the_stage(step, "loss.policy")
    assert (loss.isolated, loss.chained) == ("diverged", "pass")
    assert loss.suspect == "recorded-intermediate"
    assert "what sample recorded" in loss.message
    assert "advantage.estimate" not in loss.message
    assert the_stage(step, "sample").suspect == "recorded-intermediate"


def test_a_column_that_a_step_recorded_for_some_samples_is_compared_for_those(lake: Lake) -> None:
    samples = drawn()
    write_rollout(lake, samples)
    changed = [one.copy() for one in samples]
    changed[2].columns["rollout_log_probs"][1] += 1.0
    for one in changed[4:]:
        del one.columns["rollout_log_probs"]
    write_step(lake, changed)
    result = the_stage(the_cohort(lake.replay()), "sample")
    assert result.verdict == "diverged"
    assert places(result) == {("handoff.rollout_log_probs", "s-2", 1)}

"""What makes a stage diverge, and where; which verdict counts, and the exit code."""

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.cohorts import (
    ALL_COLUMNS,
    ALL_STAGES,
    STEP_STAGES,
    Expected,
    rank_sums,
)
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
from tests.helpers.trainer import Trainer
from trajreplay import Lake
from trajreplay.schema import Tolerance
from trajreplay.stages import Report


def _without(name: str) -> list[str]:
    return [one for one in ALL_COLUMNS if one != name]


def test_six_healthy_stages_in_one_step_pass(lake: Lake) -> None:
    write_whole(lake, drawn())
    report = lake.replay()
    assert verdicts(report) == dict.fromkeys(ALL_STAGES, "pass")
    assert (report.verdict, report.exit_code, report.first_divergent_stage) == ("pass", 0, None)


def test_a_wrong_reward_is_found_at_its_sample(lake: Lake) -> None:
    samples = drawn()
    samples[3].reward = float(samples[3].reward or 0.0) + 0.01
    Trainer(WAY).estimate(samples)
    write_whole(lake, samples)
    report = lake.replay()
    assert report.first_divergent_stage == "reward.post_process"
    assert diverged(report) == ["reward.post_process"]
    result = the_stage(report, "reward.post_process")
    assert places(result) == {("reward", "s-3", None)}
    (found,) = result.divergences
    assert (found.group_id, found.rank) == ("g-0", 1)
    assert found.recorded == samples[3].reward
    assert found.abs_error == pytest.approx(0.01, rel=1e-4)
    assert report.exit_code == 1


@pytest.mark.parametrize("column", ["kl", "advantages", "returns"])
def test_a_wrong_token_is_found_at_its_position(lake: Lake, column: str) -> None:
    samples = drawn()
    samples[4].columns[column][1] += 1e-4
    expected = rank_sums(Trainer(WAY), halves(samples))
    write_whole(lake, samples, expected=expected)
    report = lake.replay()
    stage = "advantage.kl" if column == "kl" else "advantage.estimate"
    assert diverged(report) == [stage]
    assert places(the_stage(report, stage)) == {(column, "s-4", 1)}


@pytest.mark.parametrize("field", ["loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"])
def test_a_wrong_scalar_is_found_by_name_and_rank(lake: Lake, field: str) -> None:
    samples = drawn()
    expected = rank_sums(Trainer(WAY), halves(samples))
    wrong = dict(expected[1][0].values)
    wrong[field] += 0.01
    expected[1] = [Expected(wrong, expected[1][0].meaning)]
    write_whole(lake, samples, expected=expected)
    report = lake.replay()
    assert diverged(report) == ["loss.policy"]
    (found,) = the_stage(report, "loss.policy").divergences
    assert (found.field, found.rank) == (field, 1)


def test_rewards_normalised_over_the_batch_diverge_first_at_their_stage(lake: Lake) -> None:
    samples = drawn()
    whole = [one.copy() for one in samples]
    for one in whole:
        one.group = "all"
    trainer = Trainer(WAY)
    trainer.score(whole)
    for one, other in zip(samples, whole, strict=True):
        one.reward = other.reward
    trainer.estimate(samples)
    write_whole(lake, samples)
    report = lake.replay()
    assert report.first_divergent_stage == "reward.post_process"
    assert the_stage(report, "advantage.estimate").inherited
    assert the_stage(report, "loss.policy").inherited


def test_a_kl_of_the_other_sign_diverges_at_its_stage(lake: Lake) -> None:
    samples = drawn()
    for one in samples:
        one.columns["kl"] = -one.columns["kl"]
    write_whole(lake, samples)
    result = the_stage(lake.replay(), "advantage.kl")
    assert result.verdict == "diverged"
    assert [one.ratio for one in result.divergences] == [pytest.approx(-1.0)] * 10


def test_a_kl_times_its_coefficient_is_not_the_recorded_kl(lake: Lake) -> None:
    samples = drawn()
    for one in samples:
        one.columns["kl"] = 0.1 * one.columns["kl"]
    write_whole(lake, samples)
    assert diverged(lake.replay()) == ["advantage.kl"]


def test_without_a_coefficient_the_kl_is_zeros_and_needs_no_reference(lake: Lake) -> None:
    way = replace(WAY, kl_coef=0.0)
    samples = drawn(way)
    write_whole(lake, samples, way, columns=_without("ref_log_probs"))
    samples[1].columns["kl"][0] = 1e-3
    write_whole(lake, samples, way, step_id=1, columns=_without("ref_log_probs"))
    report = lake.replay()
    assert the_cohort(report, step_id=0).verdict == "pass"
    assert places(the_stage(the_cohort(report, step_id=1), "advantage.kl")) == {("kl", "s-1", 0)}


def test_a_total_shorter_than_the_response_diverges_at_sample(lake: Lake) -> None:
    samples = drawn()
    samples[2].prompt_length = -1
    write_whole(lake, samples)
    report = lake.replay()
    assert diverged(report) == ["sample"]
    assert places(the_stage(report, "sample")) == {("total_length", "s-2", None)}


def _mixture(lake: Lake, *kinds: str) -> Report:
    for step, kind in enumerate(kinds):
        samples = drawn()
        if kind == "diverged":
            samples[0].columns["kl"][0] += 1.0
        options: dict[str, Any] = {}
        if kind == "refused":
            options = {"columns": _without("log_probs")}
        if kind == "unverified":
            options = {"stages": []}
        if kind == "precision":
            expected = rank_sums(Trainer(WAY), halves(samples))
            off = {name: value * (1 + 3e-8) for name, value in expected[0][0].values.items()}
            expected[0] = [Expected(off, expected[0][0].meaning)]
            options = {
                "expected": expected,
                "tolerances": {"loss.policy": Tolerance(0.0, 1e-9)},
            }
        write_whole(lake, samples, step_id=step, **options)
    return lake.replay()


@pytest.mark.parametrize(
    ("kinds", "verdict", "code"),
    [
        (["pass", "pass"], "pass", 0),
        (["pass", "precision"], "precision", 0),
        (["precision", "unverified"], "unverified", 3),
        (["unverified", "refused", "pass"], "refused", 3),
        (["refused", "diverged"], "diverged", 1),
        (["diverged", "unverified", "refused", "precision", "pass"], "diverged", 1),
    ],
)
def test_the_worst_verdict_counts(lake: Lake, kinds: list[str], verdict: str, code: int) -> None:
    report = _mixture(lake, *kinds)
    assert [one.verdict for one in report.cohorts] == kinds
    assert (report.verdict, report.exit_code) == (verdict, code)


def test_a_diverged_stage_outweighs_an_unverified_one_of_the_same_cohort(lake: Lake) -> None:
    samples = drawn()
    samples[0].columns["kl"][0] += 1.0
    write_whole(lake, samples, expected={})
    report = lake.replay()
    assert verdicts(report)["loss.policy"] == "unverified"
    assert report.verdict == "diverged"


def test_the_first_divergent_stage_is_the_earliest_of_rollout_and_step_together(
    lake: Lake,
) -> None:
    samples = drawn()
    samples[0].columns["kl"][0] += 1.0
    write_rollout(lake, samples)
    changed = [one.copy() for one in samples]
    changed[0].columns["advantages"][0] += 1.0
    write_step(lake, changed)
    report = lake.replay()
    assert the_cohort(report, step_id=None).first_divergent_stage == "advantage.kl"
    assert the_cohort(report).first_divergent_stage == "sample"
    assert report.first_divergent_stage == "sample"


def test_over_several_cohorts_the_first_diverged_one_names_the_stage(lake: Lake) -> None:
    for rollout_id in (1, 0):
        samples = drawn(rollout_id=rollout_id)
        if rollout_id == 0:
            samples[0].columns["advantages"][0] += 1.0
        else:
            samples[0].columns["kl"][0] += 1.0
        write_rollout(lake, samples)
    report = lake.replay()
    assert [one.rollout_id for one in report.cohorts] == [0, 1]
    assert report.first_divergent_stage == "advantage.estimate"


def test_required_stages_that_were_not_compared_are_unverified(lake: Lake) -> None:
    write_step(lake, drawn(), stages=STEP_STAGES)
    assert lake.replay().verdict == "pass"
    report = lake.replay(require_stages=True)
    assert report.verdict == "unverified"
    assert the_stage(report, "reward.raw").message == "not-declared"

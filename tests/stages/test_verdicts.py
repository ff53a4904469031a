from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.cohorts import (
    ALL_COLUMNS,
    ALL_STAGES,
    STEP_STAGES,
    Expected,
    rank_sums,
    terms,
)
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
from tests.helpers.trainer import Arithmetic, Sample, Trainer
from trajreplay import Lake, ParallelCoordinates, Settings
from trajreplay.schema import AdvantageSettings, StageContract, Tolerance
from trajreplay.stages import Report


def _without(name: str) -> list[str]:
    return [one for one in ALL_COLUMNS if one != name]


def test_six_healthy_stages_in_one_step_pass(lake: Lake) -> None:
    write_whole(lake, drawn())
    report = lake.replay()
    assert verdicts(report) == dict.fromkeys(ALL_STAGES, "pass")
    assert (report.verdict, report.exit_code, report.first_divergent_stage) == ("pass", 0, None)


# What makes a stage diverge, and where.


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


# Groups.


@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_group_of_another_size_than_stated_diverges(lake: Lake, size: int) -> None:
    write_whole(lake, drawn(), replace(WAY, group_size=size))
    report = lake.replay()
    assert diverged(report) == ["reward.post_process"]
    result = the_stage(report, "reward.post_process")
    assert result.message == "8 of 8 samples"
    found = {(one.field, one.group_id, one.recorded, one.recomputed) for one in result.divergences}
    assert found == {("group_size", "g-0", 4.0, size), ("group_size", "g-1", 4.0, size)}


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
    assert warning.check == "reward.constant-group"
    assert report.exit_code == 0


def test_a_constant_group_may_not_be_off_by_more_than_float32_can(lake: Lake) -> None:
    samples = drawn()
    for one in samples[:4]:
        one.raw_reward = 0.1
        one.reward = 0.5
    Trainer(WAY).estimate(samples)
    write_whole(lake, samples)
    assert diverged(lake.replay())[0] == "reward.post_process"


# Missing, unstated, unsupported.


@pytest.mark.parametrize(
    ("column", "stage"),
    [
        ("old_log_probs", "advantage.kl"),
        ("ref_log_probs", "advantage.kl"),
        ("log_probs", "loss.policy"),
        ("entropy", "loss.policy"),
    ],
)
def test_a_missing_input_is_refused_by_name(lake: Lake, column: str, stage: str) -> None:
    write_whole(lake, drawn(), columns=_without(column))
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert f"{stage}: input {column} is missing for 8 of 8 samples" in refusals(cohort)
    assert f"capture {column}, or do not declare {stage}" in refusals(cohort)
    assert verdicts(cohort)["reward.post_process"] == "pass"


@pytest.mark.parametrize("name", ["raw_reward", "reward"])
def test_a_missing_reward_is_refused_by_name(lake: Lake, name: str) -> None:
    write_whole(lake, drawn(), without=[name])
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert f"input {name} is missing for 8 of 8 samples" in refusals(cohort)


def test_an_input_missing_for_one_sample_is_refused(lake: Lake) -> None:
    samples = drawn()
    del samples[5].columns["entropy"]
    write_whole(lake, samples, expected={})
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "input entropy is missing for 1 of 8" in refusals(cohort)


def test_an_entropy_that_no_bonus_reads_may_be_missing(lake: Lake) -> None:
    way = replace(WAY, entropy_coef=0.0)
    samples = drawn(way)
    for one in samples:
        del one.columns["entropy"]
    write_whole(lake, samples, way)
    assert lake.replay().verdict == "pass"


@pytest.mark.parametrize(
    ("column", "stage"), [("kl", "advantage.kl"), ("advantages", "advantage.estimate")]
)
def test_a_missing_recorded_output_is_unverified(lake: Lake, column: str, stage: str) -> None:
    samples = drawn()
    stages = [one for one in ALL_STAGES if one != "loss.policy"]
    write_whole(lake, samples, columns=_without(column), stages=stages, expected={})
    del samples[1].columns[column]
    write_whole(lake, samples, step_id=1, stages=stages, expected={})
    report = lake.replay()
    assert report.exit_code == 3
    for step, count in ((0, 8), (1, 1)):
        cohort = the_cohort(report, step_id=step)
        assert cohort.verdict == "unverified"
        result = the_stage(cohort, stage)
        assert result.verdict == "unverified"
        assert f"{column} is missing for {count} of 8" in result.message


@pytest.mark.parametrize("field", ["loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"])
def test_a_missing_scalar_leaves_the_loss_unverified(lake: Lake, field: str) -> None:
    samples = drawn()
    expected = rank_sums(Trainer(WAY), halves(samples))
    fewer = {name: value for name, value in expected[0][0].values.items() if name != field}
    expected[0] = [Expected(fewer, expected[0][0].meaning)]
    write_whole(lake, samples, expected=expected)
    report = lake.replay()
    assert verdicts(report)["loss.policy"] == "unverified"
    assert field in the_stage(report, "loss.policy").message
    assert (report.verdict, report.exit_code) == ("unverified", 3)


def test_a_wrong_scalar_beside_a_missing_one_diverges(lake: Lake) -> None:
    samples = drawn()
    write_whole(lake, {0: samples}, expected={0: [Expected({"loss": 99.0})]})
    assert lake.replay().exit_code == 1


def test_scalars_of_unstated_meaning_are_shown_and_not_compared(lake: Lake) -> None:
    samples = drawn()
    nothing = {
        rank: [Expected(dict.fromkeys(one[0].values, 1e9))]
        for rank, one in rank_sums(Trainer(WAY), halves(samples)).items()
    }
    write_whole(lake, samples, settings=WAY.full, expected=nothing)
    report = lake.replay()
    result = the_stage(report, "loss.policy")
    assert result.verdict == "unverified"
    assert "without scope and reduction" in result.message


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (replace(WAY.full, advantage=AdvantageSettings("gae")), "'gae'"),
        (replace(WAY.full, kl=replace(WAY.full.kl, estimator="k9")), "kl.estimator is 'k9'"),
        (replace(WAY.full, reward=replace(WAY.full.reward, grouping="batch")), "reward.grouping"),
        (replace(WAY.full, reward=replace(WAY.full.reward, baseline="loo")), "reward.baseline"),
        (replace(WAY.full, reward=replace(WAY.full.reward, ddof=2)), "reward.ddof"),
        (replace(WAY.full, loss=replace(WAY.full.loss, aggregation="token-mean")), "token-mean"),
        (replace(WAY.full, loss=replace(WAY.full.loss, old_source="ref")), "loss.old_source"),
        *(
            (replace(WAY.full, loss=loss), f"loss.{name} is True")
            for name, loss in (
                ("use_kl_loss", replace(WAY.full.loss, use_kl_loss=True)),
                ("tis", replace(WAY.full.loss, tis=True)),
                ("opsm", replace(WAY.full.loss, opsm=True)),
                ("opd", replace(WAY.full.loss, opd=True)),
                ("per_token", replace(WAY.full.loss, per_token=True)),
            )
        ),
    ],
)
def test_unsupported_arithmetic_is_refused_by_name(
    lake: Lake, settings: Settings, name: str
) -> None:
    write_whole(lake, drawn(), settings=settings)
    report = lake.replay()
    assert (report.verdict, report.exit_code) == ("refused", 3)
    assert name in refusals(report)


@pytest.mark.parametrize("rank", [0, 1])
def test_context_parallelism_is_refused_by_name(lake: Lake, rank: int) -> None:
    sizes = [1, 1]
    sizes[rank] = 2
    parallel = {
        one: ParallelCoordinates(one, 2, context_size=size) for one, size in enumerate(sizes)
    }
    write_whole(lake, drawn(), parallel=parallel)
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "context-parallel size is 2" in refusals(cohort)


def test_what_is_not_declared_recompute_is_shown_and_changes_nothing(lake: Lake) -> None:
    stages = [
        "sample",
        StageContract("loss.policy", "unsupported", reason="TIS was on"),
        StageContract("advantage.kl", "recorded-only", reason="no reference"),
        StageContract("reward.raw", "inspect-only"),
    ]
    settings = replace(WAY.full, loss=replace(WAY.full.loss, tis=True))
    write_whole(lake, drawn(), stages=stages, settings=settings)
    report = lake.replay()
    assert verdicts(report) == {
        "sample": "pass",
        "reward.raw": "inspect-only",
        "advantage.kl": "recorded-only",
        "loss.policy": "unsupported",
    }
    assert report.verdict == "pass"


def test_an_unsupported_contract_is_shown_with_its_reason(lake: Lake) -> None:
    stages = ["sample", StageContract("loss.value", "unsupported", reason="no critic")]
    write_whole(lake, drawn(), stages=stages)
    report = lake.replay()
    assert verdicts(report) == {"sample": "pass", "loss.value": "unsupported"}
    assert the_stage(report, "loss.value").message == "no critic"
    assert report.verdict == "pass"


def test_an_unsupported_stage_that_is_asked_for_is_refused(lake: Lake) -> None:
    stages = ["sample", StageContract("loss.value", "unsupported", reason="no critic")]
    write_whole(lake, drawn(), stages=stages)
    report = lake.replay(stages=["sample", "loss.value"])
    assert report.verdict == "refused"
    assert "no critic" in refusals(report)


def test_nothing_compared_is_never_a_pass(lake: Lake) -> None:
    write_whole(lake, drawn(), stages=[])
    only = [StageContract("loss.policy", "recorded-only", reason="as logged")]
    write_whole(lake, drawn(), step_id=1, stages=only)
    report = lake.replay()
    assert [one.verdict for one in report.cohorts] == ["unverified", "unverified"]
    assert report.exit_code == 3


def test_unstated_loss_terms_are_the_first_finding_of_a_diverged_loss(lake: Lake) -> None:
    samples = drawn()
    write_whole(lake, samples)
    wrong = {0: [Expected(dict(terms(Trainer(WAY), samples)) | {"loss": 5.0})]}
    write_whole(lake, {0: samples}, step_id=1, expected=wrong)
    stated = {0: [Expected(wrong[0][0].values, {"scope": "rank", "reduction": "sum"})]}
    write_whole(lake, {0: samples}, step_id=2, expected=stated, settings=WAY.full)
    report = lake.replay()
    unstated = the_cohort(report, step_id=1).findings
    assert (unstated[0].check, unstated[0].severity) == ("settings.unstated", "warning")
    assert "use_kl_loss, tis, opsm, opd, per_token" in unstated[0].message
    for step in (0, 2):
        checks = {one.check for one in the_cohort(report, step_id=step).findings}
        assert "settings.unstated" not in checks


def test_ranks_that_claim_different_arithmetic_are_refused(lake: Lake) -> None:
    shares = halves(drawn())
    expected = rank_sums(Trainer(WAY), shares)
    write_whole(lake, {0: shares[0]}, ranks=[0, 1], expected=expected)
    write_whole(lake, {1: shares[1]}, replace(WAY, std=False), ranks=[0, 1], expected=expected)
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "ranks 0 and 1 disagree on their settings" in refusals(cohort)


# NaN and infinities.


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("column", "stage"),
    [
        ("old_log_probs", "advantage.kl"),
        ("ref_log_probs", "advantage.kl"),
        ("kl", "advantage.kl"),
        ("advantages", "advantage.estimate"),
        ("log_probs", "loss.policy"),
        ("entropy", "loss.policy"),
    ],
)
def test_a_trained_token_that_is_no_number_diverges_where_it_first_is(
    lake: Lake, column: str, stage: str, value: float
) -> None:
    samples = drawn()
    samples[4].columns[column][1] = value
    trainer = Trainer(WAY)
    if column in ("old_log_probs", "ref_log_probs"):
        trainer.estimate(samples)
    write_whole(lake, samples)
    report = lake.replay()
    assert report.first_divergent_stage == stage
    result = the_stage(report, stage)
    assert result.non_finite >= 1
    assert (column, "s-4", 1) in places(result)


def test_a_nan_that_both_sides_agree_on_is_no_pass(lake: Lake) -> None:
    samples = drawn()
    samples[0].columns["log_probs"][0] = torch.nan
    shares = halves(samples)
    expected = rank_sums(Trainer(WAY), shares)
    assert expected[0][0].values["loss"] != expected[0][0].values["loss"]
    write_whole(lake, samples, expected=expected)
    report = lake.replay()
    assert diverged(report) == ["loss.policy"]
    assert ("log_probs", "s-0", 0) in places(the_stage(report, "loss.policy"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", ALL_COLUMNS)
def test_what_is_no_number_under_the_mask_is_a_warning(
    lake: Lake, column: str, value: float
) -> None:
    samples = drawn()
    assert samples[4].mask == [0 if token == 3 else 1 for token in range(5)]
    samples[4].columns[column][3] = value
    expected = rank_sums(Trainer(WAY, "loop"), halves(samples))
    write_whole(lake, samples, expected=expected)
    report = lake.replay()
    assert report.verdict == "pass"
    warnings = {(one.check, one.sample_id, one.token) for one in report.cohorts[0].findings}
    assert warnings - {("handoff", None, None)} == {("non-finite.masked", "s-4", 3)}


def test_a_masked_nan_that_leaked_into_the_loss_diverges(lake: Lake) -> None:
    samples = drawn()
    samples[4].columns["log_probs"][3] = torch.nan
    expected = rank_sums(Trainer(WAY, "torch"), halves(samples))
    assert expected[0][0].values["loss"] != expected[0][0].values["loss"]
    write_whole(lake, samples, expected=expected)
    assert diverged(lake.replay()) == ["loss.policy"]


def test_a_raw_reward_that_is_no_number_diverges_where_it_first_is(lake: Lake) -> None:
    samples = drawn()
    samples[6].raw_reward = torch.nan
    trainer = Trainer(WAY)
    trainer.score(samples)
    trainer.estimate(samples)
    write_whole(lake, samples)
    report = lake.replay()
    assert report.first_divergent_stage == "reward.raw"
    assert ("raw_reward", "s-6", None) in places(the_stage(report, "reward.raw"))


# Degenerate and healthy.


def _few(samples: list[Sample], way: Arithmetic = WAY) -> list[Sample]:
    Trainer(way).score(samples)
    Trainer(way).estimate(samples)
    return samples


def test_all_masks_zero_is_a_pass(lake: Lake) -> None:
    samples = drawn()
    for one in samples:
        one.mask = [0] * one.length
    write_whole(lake, samples)
    report = lake.replay()
    assert report.verdict == "pass"
    assert the_stage(report, "advantage.kl").compared == 0


def test_responses_of_no_tokens_are_judged_as_they_are(lake: Lake) -> None:
    samples = drawn()
    for one in samples[:3]:
        one.mask = []
        one.columns = {name: values[:0] for name, values in one.columns.items()}
    write_whole(lake, samples)
    assert lake.replay().verdict == "pass"


def test_nothing_but_responses_of_no_tokens_is_judged_too(lake: Lake) -> None:
    samples = drawn()
    for one in samples:
        one.mask = []
        one.columns = {name: values[:0] for name, values in one.columns.items()}
    write_whole(lake, samples)
    assert lake.replay().verdict == "pass"


def test_a_rank_without_rows_is_judged_as_it_is(lake: Lake) -> None:
    shares = {0: drawn(), 1: [], 2: []}
    expected = rank_sums(Trainer(WAY), shares)
    del expected[2]
    write_whole(lake, shares, expected=expected)
    assert lake.replay().verdict == "pass"


def test_a_rank_without_rows_that_recorded_a_loss_diverges(lake: Lake) -> None:
    shares = {0: drawn(), 1: []}
    expected = rank_sums(Trainer(WAY), shares)
    expected[1] = [Expected({"loss": 0.5})]
    write_whole(lake, shares, expected=expected)
    report = lake.replay()
    assert diverged(report) == ["loss.policy"]
    (found,) = the_stage(report, "loss.policy").divergences
    assert (found.rank, found.recorded, found.recomputed) == (1, 0.5, 0.0)


def test_a_cohort_without_any_sample_is_no_pass(lake: Lake) -> None:
    write_whole(lake, {0: [], 1: []}, expected={})
    report = lake.replay()
    assert report.verdict == "unverified"
    assert report.exit_code == 3


# Tolerances.


def _off_by(lake: Lake, error: float, step_id: int, **tolerances: Tolerance) -> Report:
    samples = drawn()
    samples[0].columns["advantages"][0] += error
    named = {name.replace("__", "."): one for name, one in tolerances.items()}
    write_whole(lake, samples, step_id=step_id, tolerances=named)
    return lake.replay()


def test_a_capture_may_tighten_the_tolerance(lake: Lake) -> None:
    error = 5e-6
    assert verdicts(_off_by(lake, error, 0))["advantage.estimate"] == "pass"
    lake.refresh()
    tight = Tolerance(1e-9, 1e-9)
    report = _off_by(lake, error, 1, advantage__estimate=tight)
    assert verdicts(the_cohort(report, step_id=0))["advantage.estimate"] == "pass"
    assert verdicts(the_cohort(report, step_id=1))["advantage.estimate"] == "diverged"
    assert {one.check for one in the_cohort(report, step_id=1).findings} == {"handoff"}


def test_a_capture_cannot_loosen_the_tolerance_and_is_told_so(lake: Lake) -> None:
    report = _off_by(lake, 0.5, 0, advantage__estimate=Tolerance(10.0, 0.0))
    assert "advantage.estimate" in diverged(report)
    warnings = [one for one in report.cohorts[0].findings if one.check == "tolerance"]
    assert [one.stage for one in warnings] == ["advantage.estimate"] * 2
    assert "judged by" in warnings[0].message


@pytest.mark.parametrize("first_tight", [False, True])
def test_cohorts_with_and_without_a_tolerance_of_their_own_are_judged_each_by_its_own(
    lake: Lake, first_tight: bool
) -> None:
    way = replace(WAY, group_size=None)
    for step in (0, 1):
        samples = drawn(way)
        for one in samples:
            one.columns["advantages"] = (one.columns["advantages"] * 1.002).bfloat16()
        options = {}
        if (step == 0) == first_tight:
            options = {"tolerances": {"advantage.estimate": Tolerance(1e-6, 1e-4)}}
        stages = [one for one in ALL_STAGES if one != "loss.policy"]
        columns = _without("returns")
        write_whole(lake, samples, way, step_id=step, stages=stages, columns=columns, **options)
    report = lake.replay()
    for step in (0, 1):
        tight = (step == 0) == first_tight
        found = verdicts(the_cohort(report, step_id=step))["advantage.estimate"]
        assert found == ("diverged" if tight else "pass")


# Which verdict counts, and the exit code.


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

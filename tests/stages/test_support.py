"""What is missing, unstated or unsupported is refused or unverified, by name."""

import re
from dataclasses import replace

import pytest

from tests.helpers.cohorts import (
    ALL_COLUMNS,
    ALL_STAGES,
    Expected,
    rank_sums,
    terms,
)
from tests.helpers.scenes import (
    WAY,
    drawn,
    halves,
    refusals,
    the_cohort,
    the_stage,
    verdicts,
    write_whole,
)
from tests.helpers.trainer import Trainer
from trajreplay import Lake, ParallelCoordinates, Settings
from trajreplay.schema import AdvantageSettings, StageContract


def _without(name: str) -> list[str]:
    return [one for one in ALL_COLUMNS if one != name]


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


UNKNOWN = [
    (replace(WAY.full, advantage=AdvantageSettings("sarsa")), "'sarsa'"),
    (replace(WAY.full, kl=replace(WAY.full.kl, estimator="k9")), "kl.estimator is 'k9'"),
    (replace(WAY.full, reward=replace(WAY.full.reward, baseline="loo")), "reward.baseline"),
    (replace(WAY.full, reward=replace(WAY.full.reward, ddof=2)), "reward.ddof"),
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
]
LATER = [
    (replace(WAY.full, advantage=AdvantageSettings("gae")), "'gae'"),
    (replace(WAY.full, reward=replace(WAY.full.reward, grouping="batch")), "reward.grouping"),
    (replace(WAY.full, reward=replace(WAY.full.reward, lone="keep")), "reward.lone"),
    (replace(WAY.full, loss=replace(WAY.full.loss, aggregation="token-mean")), "token-mean"),
    (replace(WAY.full, loss=replace(WAY.full.loss, dual_clip=3.0)), "loss.dual_clip"),
]


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize(("settings", "name"), UNKNOWN)
def test_unsupported_arithmetic_is_refused_by_name(
    lake: Lake, settings: Settings, name: str, version: str
) -> None:
    stages = [StageContract(stage, version=version) for stage in ALL_STAGES]
    write_whole(lake, drawn(), settings=settings, stages=stages)
    report = lake.replay()
    assert (report.verdict, report.exit_code) == ("refused", 3)
    assert name in refusals(report)


@pytest.mark.parametrize(("settings", "name"), LATER)
def test_a_v1_contract_is_judged_by_the_frozen_matrix(
    lake: Lake, settings: Settings, name: str
) -> None:
    stages = [StageContract(stage, version="v1") for stage in ALL_STAGES]
    write_whole(lake, drawn(), settings=settings, stages=stages)
    assert name in refusals(lake.replay())


def test_a_contract_of_a_version_that_there_is_not_is_refused(lake: Lake) -> None:
    stages = [StageContract(stage, version="v9") for stage in ALL_STAGES]
    write_whole(lake, drawn(), stages=stages)
    report = lake.replay()
    assert report.verdict == "refused"
    assert "version 'v9', expected v1 or v2" in refusals(report)


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
    for name in ("use_kl_loss", "tis", "opsm", "opd", "per_token"):
        assert re.search(rf"\b{name} \([a-z]", unstated[0].message)
    assert "settings say it, as loss.use_kl_loss=false does" in unstated[0].message
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

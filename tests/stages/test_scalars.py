"""What a recorded scalar means: its scope, reduction, scale, numerator and denominator."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.cohorts import Expected, Shares, terms
from tests.helpers.recordings import RECORDINGS
from tests.helpers.scenes import WAY, diverged, drawn, halves, the_stage, write_whole
from tests.helpers.trainer import METRICS, Sample, Trainer
from trajreplay import CaptureError, Lake, SchemaError, StageContract, with_changes
from trajreplay.stages import Divergence, Report

TRAINER = Trainer(WAY)


def _replayed(lake: Lake, shares: Shares, expected: dict[int, list[Expected]]) -> Report:
    write_whole(lake, dict(shares), expected=expected, settings=WAY.full)
    return lake.replay()


def _spoilt(expected: dict[int, list[Expected]], rank: int = 0) -> dict[int, list[Expected]]:
    """The same with a ppo_kl that is off by 1 in the last call of a rank."""
    found = {one: list(calls) for one, calls in expected.items()}
    last = found[rank][-1]
    value = last.values["ppo_kl"]
    wrong = [*value[:-1], value[-1] + 1.0] if isinstance(value, list) else value + 1.0
    found[rank][-1] = replace(last, values={**last.values, "ppo_kl": wrong})
    return found


@pytest.mark.parametrize("how", RECORDINGS)
def test_right_values_pass_however_they_are_recorded(lake: Lake, how: str) -> None:
    shares = halves(drawn())
    report = _replayed(lake, shares, RECORDINGS[how](TRAINER, shares))
    assert report.verdict == "pass"


@pytest.mark.parametrize("how", RECORDINGS)
def test_a_wrong_value_is_named_however_it_is_recorded(lake: Lake, how: str) -> None:
    shares = halves(drawn())
    report = _replayed(lake, shares, _spoilt(RECORDINGS[how](TRAINER, shares)))
    assert diverged(report) == ["loss.policy"]
    (found,) = the_stage(report, "loss.policy").divergences
    places: dict[str, dict[str, Any]] = {
        "micro": {"field": "ppo_kl[mb-0001]", "rank": 0},
        "sample": {"field": "ppo_kl", "rank": 0, "sample_id": "s-6"},
        "numerator": {"field": "ppo_kl", "rank": 0, "sample_id": "s-6"},
        "global": {"field": "ppo_kl", "rank": None},
    }
    place = places.get(how, {"field": "ppo_kl", "rank": 0})
    assert {name: getattr(found, name) for name in place} == place
    assert found.recorded - found.recomputed == pytest.approx(1.0)


# Every rank's sum, stated as something else.
@pytest.mark.parametrize(
    "meaning",
    [
        {"scope": "rank", "reduction": "mean"},
        {"scope": "rank", "reduction": "mean", "denominator": 8},
        {"scope": "rank", "reduction": "sum", "scale": 0.5},
        {"scope": "global", "reduction": "sum"},
        {"scope": "micro_batch", "reduction": "sum", "micro_batch_id": "mb-0000"},
    ],
)
def test_a_sum_that_is_said_to_be_something_else_diverges(
    lake: Lake, meaning: dict[str, Any]
) -> None:
    shares = halves(drawn())
    expected = {rank: [Expected(terms(TRAINER, own), meaning)] for rank, own in shares.items()}
    assert diverged(_replayed(lake, shares, expected)) == ["loss.policy"]


def _one(lake: Lake, meaning: dict[str, Any], factor: float) -> Report:
    shares = {0: drawn()}
    expected = {0: [Expected(terms(TRAINER, shares[0], factor), meaning)]}
    return _replayed(lake, shares, expected)


@pytest.mark.parametrize("how", RECORDINGS)
@pytest.mark.parametrize("settled", ["sum", "mean"])
def test_a_scalar_that_becomes_one_number_otherwise_than_stated_is_said(
    lake: Lake, how: str, settled: str
) -> None:
    shares, settings = halves(drawn()), with_changes(WAY.full, {"loss.batch_reduction": settled})
    expected = RECORDINGS[how](TRAINER, shares)
    write_whole(lake, dict(shares), expected=expected, settings=settings)
    (cohort,) = lake.replay().cohorts
    said = {one.message for one in cohort.findings if one.check == "loss.reduction"}
    over = {"global": "the cohort", "rank": "a rank", "micro_batch": "a micro-batch"}
    due = set()
    for call in (one for calls in expected.values() for one in calls):
        reduction, scope = call.meaning.get("reduction", "sum"), call.meaning.get("scope")
        share = scope != "global" and reduction == "sum" and call.meaning.get("scale", 1.0) < 1.0
        if scope in over and not share and (reduction == "sum") != (settled == "sum"):
            due |= {
                f"{name} is stated a {reduction} over {over[scope]}, where "
                f"loss.batch_reduction is {settled!r}"
                for name in call.values
            }
    assert said == due


def test_a_mean_divides_by_the_samples_of_its_scope_unless_it_says_by_what(lake: Lake) -> None:
    assert _one(lake, {"scope": "rank", "reduction": "mean"}, 1 / 8).verdict == "pass"


def test_a_mean_divides_by_its_denominator(lake: Lake) -> None:
    meaning = {"scope": "rank", "reduction": "mean", "denominator": 8, "scale": 4.0}
    assert _one(lake, meaning, 4.0 / 8).verdict == "pass"


def test_a_denominator_that_is_no_count_of_samples_verifies_nothing(lake: Lake) -> None:
    meaning = {"scope": "rank", "reduction": "mean", "denominator": 20}
    report = _one(lake, meaning, 1.0 / 20)
    assert report.verdict == "unverified"
    assert "which is no count of its samples" in the_stage(report, "loss.policy").message


@pytest.mark.parametrize("number", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["scale", "denominator"])
def test_a_factor_beside_which_any_value_agrees_is_refused(
    lake: Lake, name: str, number: float
) -> None:
    meaning = {"scope": "rank", "reduction": "mean", name: number}
    with pytest.raises(CaptureError, match="expected a positive finite number"):
        _one(lake, meaning, 1.0)


def test_a_small_scale_does_not_hide_an_error_in_the_tolerance(lake: Lake) -> None:
    meaning = {"scope": "rank", "reduction": "sum", "scale": 1e-9}
    assert diverged(_one(lake, meaning, 1.1e-9)) == ["loss.policy"]


def test_a_numerator_is_compared_too(lake: Lake) -> None:
    shares = {0: drawn()}
    sums = terms(TRAINER, shares[0])
    wrong = {**sums, "pg_loss": sums["pg_loss"] + 0.5}
    meaning = {"scope": "rank", "reduction": "weighted-mean", "numerator": wrong, "denominator": 8}
    values = {name: value / 8 for name, value in sums.items()}
    report = _replayed(lake, shares, {0: [Expected(values, meaning)]})
    (found,) = the_stage(report, "loss.policy").divergences
    assert found.field == "pg_loss.numerator"


def test_a_weighted_mean_that_is_not_its_quotient_diverges(lake: Lake) -> None:
    shares = {0: drawn()}
    sums = terms(TRAINER, shares[0])
    meaning = {"scope": "rank", "reduction": "weighted-mean", "numerator": sums, "denominator": 8}
    report = _replayed(lake, shares, {0: [Expected(sums, meaning)]})
    found = the_stage(report, "loss.policy").divergences
    assert {one.field for one in found} == {name for name in METRICS if sums[name]}
    assert [one.ratio for one in found] == [pytest.approx(8.0, rel=1e-5)] * len(found)


def test_each_rank_dividing_by_its_own_count_is_found(lake: Lake) -> None:
    samples = drawn()
    shares = {0: samples[:6], 1: samples[6:]}
    meaning = {"scope": "rank", "reduction": "mean", "denominator": 8}
    expected = {
        rank: [Expected(terms(TRAINER, own, 1 / len(own)), meaning)] for rank, own in shares.items()
    }
    report = _replayed(lake, shares, expected)
    assert diverged(report) == ["loss.policy"]
    ratios = {(one.rank, round(one.ratio or 0.0, 4)) for one in _all(report)}
    assert ratios == {(0, round(8 / 6, 4)), (1, 4.0)}


def _all(report: Report) -> list[Divergence]:
    return the_stage(report, "loss.policy").divergences


def test_a_loss_divided_again_by_the_accumulation_steps_is_found(lake: Lake) -> None:
    report = _one(lake, {"scope": "rank", "reduction": "sum"}, 0.25)
    assert all(one.ratio == pytest.approx(0.25, rel=1e-5) for one in _all(report))
    assert diverged(report) == ["loss.policy"]


def test_micro_batches_of_one_name_on_two_ranks_are_two(lake: Lake) -> None:
    shares = halves(drawn())
    assert shares[0][0].micro_batch_id == shares[1][0].micro_batch_id
    expected = RECORDINGS["micro"](TRAINER, shares)
    expected[0][0], expected[1][0] = expected[1][0], expected[0][0]
    report = _replayed(lake, shares, expected)
    assert {(one.rank, one.field) for one in _all(report) if "ppo_kl" in one.field} == {
        (0, "ppo_kl[mb-0000]"),
        (1, "ppo_kl[mb-0000]"),
    }


def test_a_micro_batch_whose_loss_is_missing_leaves_the_loss_unverified(lake: Lake) -> None:
    shares = halves(drawn())
    expected = RECORDINGS["micro"](TRAINER, shares)
    del expected[1][1]
    report = _replayed(lake, shares, expected)
    result = the_stage(report, "loss.policy")
    assert result.verdict == "unverified"
    assert "not recorded" in result.message
    assert "loss, pg_loss" in result.message


def test_a_rank_total_beside_one_micro_batch_is_enough(lake: Lake) -> None:
    shares = halves(drawn())
    expected = RECORDINGS["micro"](TRAINER, shares)
    total = {"scope": "rank", "reduction": "sum"}
    expected[1] = [expected[1][0], Expected(terms(TRAINER, shares[1]), total)]
    assert _replayed(lake, shares, expected).verdict == "pass"


def test_a_rank_with_rows_and_no_losses_leaves_the_loss_unverified(lake: Lake) -> None:
    shares = halves(drawn())
    expected = RECORDINGS["sum"](TRAINER, shares)
    del expected[1]
    report = _replayed(lake, shares, expected)
    assert the_stage(report, "loss.policy").verdict == "unverified"


def test_a_global_scalar_covers_the_ranks_that_recorded_none(lake: Lake) -> None:
    shares = {0: drawn()[:5], 1: drawn()[5:], 2: []}
    report = _replayed(lake, shares, RECORDINGS["global"](TRAINER, shares))
    assert report.verdict == "pass"


def test_ranks_that_disagree_on_a_global_scalar_are_each_compared(lake: Lake) -> None:
    shares = halves(drawn())
    right = RECORDINGS["global"](TRAINER, shares)[0]
    wrong = [replace(right[0], values={**right[0].values, "loss": 9.0})]
    report = _replayed(lake, shares, {0: right, 1: wrong})
    (found,) = _all(report)
    assert (found.field, found.recorded) == ("loss", 9.0)


def test_values_recorded_beside_the_rewards_are_held_against_them(lake: Lake) -> None:
    samples = drawn()

    def echoes(raw: list[float], rewards: list[float]) -> list[Expected]:
        sample = {"scope": "sample"}
        return [
            Expected({"raw_rewards": raw}, sample, "reward.raw"),
            Expected({"rewards": rewards}, sample, "reward.post_process"),
            Expected(terms(TRAINER, samples), {"scope": "rank", "reduction": "sum"}),
        ]

    raw = [one.raw_reward for one in samples]
    rewards = [float(one.reward or 0.0) for one in samples]
    assert _replayed(lake, {0: samples}, {0: echoes(raw, rewards)}).verdict == "pass"
    raw[2] += 1.0
    rewards[6] += 1.0
    write_whole(lake, {0: samples}, step_id=1, expected={0: echoes(raw, rewards)})
    lake.refresh()
    report = lake.replay(steps=[(0, 1)])
    assert diverged(report) == ["reward.raw", "reward.post_process"]
    (first,) = the_stage(report, "reward.raw").divergences
    (second,) = the_stage(report, "reward.post_process").divergences
    assert (first.field, first.sample_id) == ("raw_rewards", "s-2")
    assert (second.field, second.sample_id) == ("rewards", "s-6")


def test_the_sums_of_a_step_split_in_any_way_agree(lake: Lake) -> None:
    samples: list[Sample] = drawn()
    for step, cut in enumerate((1, 4, 7)):
        shares = {0: samples[:cut], 1: samples[cut:]}
        write_whole(lake, shares, step_id=step)
    assert lake.replay().verdict == "pass"


def test_losses_that_cancel_are_judged_by_what_they_are_made_of(lake: Lake) -> None:
    way = replace(WAY, group_size=2, std=False)
    samples = drawn(way)[:2]
    for one, raw in zip(samples, (1000.0, 0.0), strict=True):
        one.raw_reward, one.mask = raw, [1, 1, 1]
        one.columns = {
            name: torch.full((3,), -1.0 / 3.0) for name in one.columns if name != "returns"
        }
    trainer = Trainer(way)
    trainer.score(samples)
    trainer.estimate(samples)
    total = dict(terms(trainer, samples))
    assert abs(total["pg_loss"]) < 1e-3
    total["pg_loss"] += 2e-5
    total["loss"] = total["pg_loss"] - 0.01 * total["entropy_loss"]
    meaning = {"scope": "rank", "reduction": "sum"}
    write_whole(lake, {0: samples}, way, expected={0: [Expected(total, meaning)]})
    total["pg_loss"] += 0.1
    write_whole(lake, {0: samples}, way, step_id=1, expected={0: [Expected(total, meaning)]})
    report = lake.replay()
    assert [one.verdict for one in report.cohorts] == ["precision", "diverged"]


NAMED: list[tuple[tuple[str, ...], tuple[str, ...], str]] = [
    (("loss",), ("loss",), "pass"),
    (("loss", "pg_loss"), ("loss",), "unverified"),
    ((), ("loss",), "unverified"),
    (("loss",), (), "unverified"),
    (("loss",), ("loss", "ppo_kl"), "pass"),
]


@pytest.mark.parametrize(("named", "recorded", "verdict"), NAMED)
def test_a_producer_may_name_the_scalars_that_it_computes(
    lake: Lake, named: tuple[str, ...], recorded: tuple[str, ...], verdict: str
) -> None:
    shares = halves(drawn())
    values = {
        rank: {name: terms(TRAINER, own)[name] for name in recorded} for rank, own in shares.items()
    }
    meaning = {"scope": "rank", "reduction": "sum"}
    write_whole(
        lake,
        dict(shares),
        expected={rank: [Expected(one, meaning)] for rank, one in values.items()},
        settings=WAY.full,
        stages=["sample", StageContract("loss.policy", scalars=named)],
    )
    assert the_stage(lake.replay(), "loss.policy").verdict == verdict


def test_a_scalar_that_is_not_named_is_compared_all_the_same(lake: Lake) -> None:
    shares = halves(drawn())
    write_whole(
        lake,
        dict(shares),
        expected=_spoilt(RECORDINGS["sum"](TRAINER, shares)),
        settings=WAY.full,
        stages=["sample", StageContract("loss.policy", scalars=["loss"])],
    )
    assert diverged(lake.replay()) == ["loss.policy"]


@pytest.mark.parametrize(
    ("stage", "scalars"),
    [
        ("loss.policy", ("pg_loss",)),
        ("loss.policy", ("loss", "reward")),
        ("loss.policy", ("",)),
        ("reward.raw", ("raw_rewards",)),
        ("sample", ("loss",)),
    ],
)
def test_a_loss_names_at_least_itself(stage: str, scalars: tuple[str, ...]) -> None:
    with pytest.raises(SchemaError, match="scalars are"):
        StageContract(stage, scalars=scalars)

"""A capture's own tolerance may tighten the policy and never loosen it."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.cohorts import (
    ALL_COLUMNS,
    ALL_STAGES,
    Expected,
    rank_sums,
    terms,
)
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    halves,
    the_cohort,
    the_stage,
    verdicts,
    write_whole,
)
from tests.helpers.trainer import Trainer
from trajreplay import Lake
from trajreplay.schema import QueryError, Tolerance
from trajreplay.stages import Report


def _without(name: str) -> list[str]:
    return [one for one in ALL_COLUMNS if one != name]


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


def test_a_replay_may_be_asked_to_compare_more_strictly(lake: Lake) -> None:
    assert verdicts(_off_by(lake, 5e-6, 0))["advantage.estimate"] == "pass"
    found = verdicts(lake.replay(atol=0.0, rtol=0.0))
    assert found["advantage.estimate"] == "diverged"
    assert found["advantage.kl"] in ("pass", "precision")


@pytest.mark.parametrize("error", [1e-3, 0.5, 40.0])
def test_what_only_a_looser_tolerance_accepts_is_precision_and_never_a_pass(
    lake: Lake, error: float
) -> None:
    assert "advantage.estimate" in diverged(_off_by(lake, error, 0))
    report = lake.replay(atol=100.0)
    assert report.verdict == "precision"
    (stage,) = [one for one in report.cohorts[0].stages if one.stage == "advantage.estimate"]
    assert stage.verdict == "precision"
    assert stage.message.endswith("accepted as asked: atol 100")
    assert report.to_json()["comparison"] == {"atol": 100.0, "rtol": None, "exact": False}
    assert "advantage.estimate" in diverged(lake.replay(atol=error / 2, rtol=0.0))


def test_a_looser_tolerance_of_scalars_is_precision_too(lake: Lake) -> None:
    shares, meaning = halves(drawn()), {"scope": "rank", "reduction": "sum"}
    off = {
        rank: [Expected(terms(Trainer(WAY), samples, 1.5), meaning)]
        for rank, samples in shares.items()
    }
    write_whole(lake, shares, expected=off)
    assert diverged(lake.replay()) == ["loss.policy"]
    report = lake.replay(rtol=1e6)
    assert verdicts(report)["loss.policy"] == "precision"
    assert verdicts(report)["advantage.kl"] == "pass"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_tolerance_accepts_what_is_not_finite(lake: Lake, value: float) -> None:
    samples = drawn()
    samples[0].columns["advantages"][0] = value
    write_whole(lake, samples)
    report = lake.replay(atol=1e300, rtol=1e300)
    assert "advantage.estimate" in diverged(report)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_none_is_refused(lake: Lake, value: float) -> None:
    write_whole(lake, drawn())
    with pytest.raises(QueryError, match="expected a finite number"):
        lake.replay(rtol=value)


def test_exact_shows_a_value_that_is_off_by_its_last_bit(lake: Lake) -> None:
    samples = drawn()
    write_whole(lake, samples)
    assert verdicts(lake.replay(exact=True))["advantage.kl"] == "pass"
    kl = samples[0].columns["kl"]
    kl[0] = torch.nextafter(kl[0], torch.tensor(9.0))
    write_whole(lake, samples, step_id=1)
    lake.refresh()
    assert verdicts(the_cohort(lake.replay(), step_id=1))["advantage.kl"] == "pass"
    report = lake.replay(exact=True)
    assert verdicts(the_cohort(report, step_id=0))["advantage.kl"] == "pass"
    off = the_cohort(report, step_id=1)
    (stage,) = [one for one in off.stages if one.stage == "advantage.kl"]
    assert stage.verdict == "precision"
    assert stage.message.startswith("1 of ")


def test_exact_sums_a_loss_in_float32_as_a_trainer_does(lake: Lake) -> None:
    write_whole(lake, drawn())
    found = lake.replay(exact=True)
    assert verdicts(found)["loss.policy"] in ("pass", "precision")
    assert not diverged(found)


def test_exact_reaches_what_is_recorded_beside_a_column(lake: Lake) -> None:
    way = replace(WAY, grouped=False)
    for step_id, off in enumerate((False, True)):
        samples = drawn(way)
        echo = [torch.tensor(one.reward, dtype=torch.float32) for one in samples]
        if off:
            echo[2] = torch.nextafter(echo[2], torch.tensor(9.0))
        shares = {0: samples}
        expected = {
            0: [
                Expected(
                    {"rewards": [float(one) for one in echo]},
                    {"scope": "sample"},
                    "reward.post_process",
                ),
                *rank_sums(Trainer(way), shares)[0],
            ]
        }
        write_whole(lake, shares, way, step_id=step_id, expected=expected)
    lake.refresh()
    plain, report = lake.replay(), lake.replay(exact=True)
    found = [
        the_stage(the_cohort(one, step_id=step), "reward.post_process")
        for one in (plain, report)
        for step in (0, 1)
    ]
    assert [one.verdict for one in found] == ["pass", "pass", "pass", "precision"]
    assert found[-1].message.startswith("1 of 16 samples agree and do not have the bits")

"""NaN, infinities and degenerate samples: located, and judged as they are."""

import pytest
import torch

from tests.helpers.cohorts import (
    ALL_COLUMNS,
    Expected,
    rank_sums,
)
from tests.helpers.scenes import (
    WAY,
    diverged,
    drawn,
    halves,
    places,
    the_stage,
    write_whole,
)
from tests.helpers.trainer import Arithmetic, Sample, Trainer
from trajreplay import Lake


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

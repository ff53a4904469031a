"""What is not finite in a column, of which some samples may lack values."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cli import run
from tests.helpers.cohorts import ROLLOUT_COLUMNS, Expected, rank_sums
from tests.helpers.scenes import WAY, drawn, halves, write_rollout, write_whole
from tests.helpers.trainer import Trainer
from trajreplay import Lake, with_changes
from trajreplay.stages.cohorts.not_finite import Samples

_VALUES = st.sampled_from([0.5, -1.0, math.nan, math.inf, -math.inf])
_SAMPLES = st.lists(
    st.tuples(
        st.lists(st.tuples(_VALUES, st.booleans()), max_size=4), st.none() | _VALUES, st.booleans()
    ),
    max_size=6,
)


@given(samples=_SAMPLES, chunked=st.booleans())
def test_the_first_that_does_harm_is_found_among_nulls(
    samples: list[tuple[list[tuple[float, bool]], float | None, bool]], chunked: bool
) -> None:
    columns = {
        "sample_id": [f"s-{row}" for row in range(len(samples))],
        "loss_mask": [[int(trained) for _, trained in tokens] for tokens, _, _ in samples],
        "kl": [None if null else [value for value, _ in tokens] for tokens, _, null in samples],
        "reward": [score for _, score, _ in samples],
    }
    kinds = {
        "sample_id": pa.string(),
        "loss_mask": pa.list_(pa.uint8()),
        "kl": pa.list_(pa.float32()),
        "reward": pa.float64(),
    }
    table = pa.table({name: pa.array(one, kinds[name]) for name, one in columns.items()})
    if chunked and len(table) > 1:
        table = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    odd = [
        (not trained, row, token, value)
        for row, (tokens, _, null) in enumerate(samples)
        for token, (value, trained) in enumerate(tokens)
        if not null and not math.isfinite(value)
    ]
    found = Samples(table).not_finite("kl")
    assert (found is None) == (not odd)
    if found is not None:
        masked, row, token, value = min(odd, key=lambda one: one[:3])
        assert (found.masked, found.sample_id, found.token) == (masked, f"s-{row}", token)
        assert found.value == value or (found.value != found.value and value != value)
        assert (found.count, found.trained) == (len(odd), sum(not one[0] for one in odd))
    scores = [
        (row, score)
        for row, (_, score, _) in enumerate(samples)
        if score is not None and not math.isfinite(score)
    ]
    scored = Samples(table).not_finite("reward")
    assert (scored is None) == (not scores)
    if scored is not None:
        assert (scored.count, scored.trained) == (len(scores), len(scores))
        assert (scored.sample_id, scored.token, scored.masked) == (f"s-{scores[0][0]}", None, False)
    assert Samples(table).not_finite("returns") is None


@pytest.mark.parametrize("column", ROLLOUT_COLUMNS)
def test_a_nan_in_a_column_that_some_samples_lack_is_found_everywhere(
    lake: Lake, column: str
) -> None:
    samples = drawn()
    samples[4].columns[column][1] = torch.nan
    del samples[0].columns[column]
    write_rollout(lake, samples, stages=["sample"])
    (cohort,) = lake.replay().cohorts
    said = [(one.check, one.sample_id, one.token) for one in cohort.findings]
    assert said == [("non-finite.unread", "s-4", 1)]
    assert cohort.verdict == "diverged"
    (first,) = lake.explain().non_finite
    assert (first.column, first.sample_id, first.token, first.masked) == (column, "s-4", 1, False)
    (told,) = lake.validate(deep=True).findings
    assert (told.check, told.severity) == ("non-finite.trained", "error")


def test_the_first_under_the_mask_and_the_first_trained_are_both_placed(lake: Lake) -> None:
    """What no stage reads and what is masked hides nothing of what made the loss no number."""
    samples = drawn()
    samples[4].columns["rollout_log_probs"][3] = torch.nan
    samples[5].columns["log_probs"][0] = torch.nan
    write_whole(lake, samples, expected=rank_sums(Trainer(WAY), halves(samples)))
    (first,) = lake.explain().non_finite
    assert (first.column, first.sample_id, first.token) == ("log_probs", "s-5", 0)
    assert "log_probs of s-5 token 0 (NaN, trained)" in first.text
    assert "the first one under the mask rollout_log_probs of s-4 token 3 (NaN)" in first.text
    for mode in ((), ("--across",)):
        assert first.text in run("explain", "--lake", lake.path, *mode).out
    notes = [one.note for one in lake.explain().explanations if one.stage == "loss.policy"]
    assert notes
    assert not any("values agree" in one or "expected nan" in one for one in notes)


def test_a_missing_reward_that_is_legal_is_not_where_it_began(lake: Lake) -> None:
    settings = with_changes(WAY.full, {"reward.missing": "exclude"})
    samples = drawn()
    samples[0].raw_reward, samples[0].reward = torch.nan, 0.0
    samples[5].reward = torch.inf
    stages = ("sample", "reward.raw", "reward.post_process")
    write_rollout(lake, samples, settings=settings, stages=stages)
    (first,) = lake.explain().non_finite
    assert (first.column, first.sample_id) == ("reward", "s-5")


@pytest.mark.parametrize(
    ("trained", "masked"), [((0, 0), (4, 3)), ((5, 0), (4, 3)), ((4, 4), (4, 3)), ((4, 2), (4, 3))]
)
def test_the_first_of_a_column_is_that_of_the_first_sample_and_token(
    lake: Lake, trained: tuple[int, int], masked: tuple[int, int]
) -> None:
    samples = drawn()
    for row, token in (trained, masked):
        samples[row].columns["old_log_probs"][token] = torch.nan
    assert [samples[row].mask[token] for row, token in (trained, masked)] == [1, 0]
    write_whole(lake, samples)
    (first,) = lake.explain().non_finite
    row, token = min(trained, masked)
    assert (first.column, first.sample_id, first.token) == ("old_log_probs", f"s-{row}", token)
    assert first.masked == ((row, token) == masked)
    for one, (row, token) in ((first.trained, trained), (first.under_mask, masked)):
        assert one is not None
        assert (one.sample_id, one.token) == (f"s-{row}", token)
        assert f"of s-{row} token {token}" in first.text


@pytest.mark.parametrize("row", [0, 3, 5])
def test_a_value_beside_a_raw_reward_that_is_no_number_is_of_its_sample(
    lake: Lake, row: int
) -> None:
    """It comes before columns of later stages, and differs by no number."""
    samples = drawn()
    samples[1].columns["log_probs"][0] = torch.nan
    shares = halves(samples)
    losses = rank_sums(Trainer(WAY), shares)
    number = {one.sample_id: at for at, one in enumerate(samples)}
    expected = {
        rank: [
            Expected(
                {
                    "raw_rewards": [
                        torch.nan if number[one.sample_id] == row else one.raw_reward for one in own
                    ]
                },
                {"scope": "sample"},
                "reward.raw",
            ),
            *losses[rank],
        ]
        for rank, own in shares.items()
    }
    write_whole(lake, shares, expected=expected)
    found = lake.explain()
    (first,) = found.non_finite
    assert (first.column, first.stage, first.sample_id) == ("raw_rewards", "reward.raw", f"s-{row}")
    assert f"raw_rewards of s-{row} (NaN)" in first.text
    (raw,) = [one for one in found.explanations if one.stage == "reward.raw"]
    assert "1 of 8 raw rewards, or what was recorded beside them, are not finite" in raw.text
    assert "nan" not in raw.text

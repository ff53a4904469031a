"""What diverged is never without a word: where no fault is known, what a replay says is said."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cli import run
from tests.helpers.cohorts import Expected, rank_sums
from tests.helpers.scenes import WAY, drawn, halves, write_rollout, write_step, write_whole
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake, with_changes
from trajreplay.query import Cohort
from trajreplay.stages.explain import Explained, clusters

STAGES = ("sample", "reward.raw", "reward.post_process")


def _other_group(samples: list[Sample]) -> None:
    for one in samples:
        one.group = "g-0"


def _other_name(samples: list[Sample]) -> None:
    samples[0].sample_id = "zzz"


def _longer(samples: list[Sample]) -> None:
    one = samples[0]
    one.mask = [*one.mask, 1]
    one.columns = {name: torch.cat([each, each[-1:]]) for name, each in one.columns.items()}


BROKEN: dict[str, tuple[Callable[[list[Sample]], None], str]] = {
    "group": (_other_group, "the step consumed g-0, its rollout recorded g-1"),
    "name": (_other_name, "zzz was consumed and is no sample of rollout 0"),
    "length": (_longer, "s-0"),
}


def _all_said(found: Explained) -> None:
    """Every stage that diverged has an explanation of its own."""
    said = {(one.cohort, one.stage) for one in found.explanations if not one.warns}
    for cohort in found.report.cohorts:
        place = Cohort(cohort.run_id, cohort.attempt, cohort.rollout_id, cohort.step_id)
        for result in cohort.stages:
            if result.verdict == "diverged":
                assert (place, result.stage) in said, (place, result.stage)


@pytest.mark.parametrize("case", BROKEN)
def test_a_step_that_consumed_something_else_is_told(lake: Lake, case: str) -> None:
    change, words = BROKEN[case]
    samples = drawn()
    write_rollout(lake, samples)
    consumed = [one.copy() for one in samples]
    change(consumed)
    write_step(lake, consumed, stages=["sample"], expected={})
    found = lake.explain()
    _all_said(found)
    told = [one.text for one in found.explanations if one.stage == "sample"]
    assert any(words in one for one in told), told
    shown = run("explain", "--lake", lake.path)
    assert shown.code == 1
    assert "nothing diverged" not in shown.out
    assert words in shown.out


def test_a_rollout_that_is_not_here_hides_no_other_hand_off(lake: Lake) -> None:
    samples, others = drawn(), drawn(rollout_id=1)
    for other in others:
        other.sample_id, other.group = f"t{other.sample_id}", f"t{other.group}"
    write_rollout(lake, samples)
    consumed = [one.copy() for one in samples]
    for each in consumed:
        each.columns["old_log_probs"] = each.columns["old_log_probs"].bfloat16().float()
    write_step(lake, [*consumed, *others], stages=["sample"], expected={})
    found = lake.explain()
    _all_said(found)
    (one,) = [one for one in found.explanations if one.stage == "sample"]
    assert one.first is not None
    assert one.first.faults == ("handoff.rounded",)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_group_of_another_size_is_named_whatever_else_is_wrong(lake: Lake, wrong: bool) -> None:
    """One member is lost: after normalisation, or before it, when values differ as well."""
    samples = drawn()
    if wrong:
        for row, sample in enumerate(samples):
            assert sample.reward is not None
            sample.reward += 0.1 * row
    stated = with_changes(WAY.full, {"reward.n_samples_per_prompt": 4})
    write_rollout(lake, {0: samples[:7]}, stages=STAGES, settings=stated)
    found = lake.explain()
    _all_said(found)
    named = [one for one in found.explanations if one.first]
    assert ("group.short",) in [one.first.faults for one in named if one.first]
    assert any("group g-1 has 3 members" in one.text for one in named)
    findings = found.report.cohorts[0].findings
    assert [one.check for one in findings if one.severity == "error"] == ["group.short"]


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.05, 0.3, 1.0, 5.0]))
def test_nothing_is_reproduced_that_is_off_by_as_much_as_the_settings(
    seed: int, spread: float
) -> None:
    """Random values are no fault's; a bound that would hold anything holds nothing."""
    numbers = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        samples = drawn(rollout_id=seed % 1000)
        for sample in samples:
            assert sample.reward is not None
            sample.reward = float(np.float32(sample.reward + numbers.normal(0.0, spread)))
        write_rollout(lake, samples, stages=STAGES)
        for one in lake.explain().explanations:
            for each in one.hypotheses:
                assert one.told or each.max_error <= 1e-2 * one.misses_by, one.text


def test_a_count_that_was_invented_is_explained_with_doubt(lake: Lake) -> None:
    """Of the few values that one clip fraction can have, many mistakes give the one recorded."""
    samples = drawn(seed=1)
    made = rank_sums(Trainer(WAY), halves(samples))
    counted = {
        rank: [Expected({"pg_clipfrac": one.values["pg_clipfrac"] if rank else 1.0}, one.meaning)]
        for rank, (one,) in made.items()
    }
    write_whole(lake, samples, expected=counted)
    explained = lake.explain()
    (found,) = [one for one in explained.explanations if one.stage == "loss.policy"]
    assert found.hypotheses
    for one in found.hypotheses:
        assert one.by_chance == found.differ
        assert one.to_json()["by_chance"] == found.differ
    assert "recorded values equal" not in found.text
    (cluster,) = [one for one in clusters(explained) if one.stage == "loss.policy"]
    assert ": equal " not in cluster.text
    assert "which other mistakes give by chance" in cluster.text

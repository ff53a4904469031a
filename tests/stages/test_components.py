"""Rewards of several components: what is wrong with them, and what they are not held against."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.cohorts import capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.mutate import change_entry
from tests.helpers.scenes import WAY, refusals, step_key, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_composed import APART, COLUMNS, PARTS, PLAIN, REWARD, _shares, _take_apart
from trajreplay import Lake, with_changes
from trajreplay.schema import Entry
from trajreplay.stages import CohortReport

RAW = "reward.raw"
STAGES = ("sample", RAW, REWARD, "advantage.estimate")
Samples = list[Sample]


def _write(
    lake: Lake,
    changes: dict[str, Any],
    spoil: Callable[[Samples], None] = lambda samples: None,
    **options: Any,
) -> None:
    shares, settings = _shares(), with_changes(PLAIN, changes)
    samples = [one for own in shares.values() for one in own]
    _take_apart(shares, missing=settings.reward.missing == "exclude")
    trainer = ComposedTrainer(settings, shares)
    trainer.score()
    trainer.estimate()
    spoil(samples)
    options = {"stages": STAGES, "columns": COLUMNS} | options
    capture(lake, shares, WAY, step_id=0, settings=settings, **options)


def _replayed(lake: Lake, *args: Any, reward: Any = None, **options: Any) -> CohortReport:
    _write(lake, *args, **options)
    return the_cohort(lake.replay(reward=reward))


def _parts(sample: Sample) -> dict[str, float]:
    assert sample.components is not None
    return sample.components


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_component_that_is_not_finite_is_named(lake: Lake, value: float) -> None:
    cohort = _replayed(lake, APART, lambda samples: _parts(samples[2]).update(format=value))
    found = the_stage(cohort, RAW)
    assert (found.verdict, cohort.first_divergent_stage) == ("diverged", RAW)
    (one,) = found.divergences
    assert (one.field, one.sample_id) == ("reward_components.format", "s-2")


def test_a_missing_component_is_no_fault_where_it_is_excluded(lake: Lake) -> None:
    cohort = _replayed(lake, {**APART, "reward.missing": "exclude"})
    assert cohort.verdict == "pass"


def test_an_infinite_component_is_a_fault_where_missing_ones_are_excluded(lake: Lake) -> None:
    changes = {**APART, "reward.missing": "exclude"}
    cohort = _replayed(lake, changes, lambda samples: _parts(samples[3]).update(answer=math.inf))
    assert cohort.first_divergent_stage == RAW
    assert [one.sample_id for one in the_stage(cohort, RAW).divergences] == ["s-3"]


def test_a_raw_reward_that_is_not_the_sum_of_its_components_is_found(lake: Lake) -> None:
    def spoil(samples: Samples) -> None:
        samples[1].raw_reward += 0.5

    cohort = _replayed(lake, PARTS, spoil)
    found = the_stage(cohort, RAW)
    assert (cohort.first_divergent_stage, found.mismatches) == (RAW, 1)
    assert [(one.field, one.sample_id) for one in found.divergences] == [("raw_reward", "s-1")]
    assert the_stage(cohort, REWARD).verdict == "pass"


def test_components_alone_are_enough(lake: Lake) -> None:
    cohort = _replayed(lake, PARTS, without=("raw_reward",))
    assert cohort.verdict == "pass"
    assert the_stage(cohort, RAW).compared == len(_shares()[0]) * 2


def test_a_reward_without_its_components_is_refused_by_name(lake: Lake) -> None:
    cohort = _replayed(lake, PARTS, without=("reward_components",))
    assert cohort.verdict == "refused"
    assert "reward.post_process: input reward_components is missing for 8 of 8" in refusals(cohort)


def test_a_reward_function_says_nothing_of_components(lake: Lake) -> None:
    cohort = _replayed(lake, PARTS, without=("raw_reward",), reward=lambda sample: 0.0)
    found = the_stage(cohort, RAW)
    assert found.verdict == "unverified"
    assert "reward_components alone were captured" in found.message


def test_a_reward_function_is_held_against_the_sum(lake: Lake) -> None:
    cohort = _replayed(lake, PARTS, reward=lambda sample: -7.0)
    assert cohort.first_divergent_stage == RAW
    assert the_stage(cohort, REWARD).verdict == "pass"


def test_another_number_of_components_than_weights_is_refused(lake: Lake) -> None:
    _write(lake, PARTS)

    def change(entry: Entry) -> Entry:
        tree: dict[str, Any] = dict(entry.settings_tree)
        tree["reward"] = {**tree["reward"], "weights": {"answer": 1.0}}
        return replace(entry, settings_tree=tree)

    for rank in (0, 1):
        change_entry(lake, step_key(rank), change)
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    expected = "reward_components has 2 values, expected 1, one for each of reward.weights: answer"
    assert expected in cohort.refusal
    found = [one.message for one in lake.validate().findings]
    assert (
        sum("reward_components has 8 values, expected 1 of each of 4" in one for one in found) == 2
    )
    deep = [one for one in lake.validate(deep=True).findings if expected[:42] in one.message]
    assert Counter(one.check for one in deep)["contracts.unchecked"] == 1, "of both ranks"
    assert len(deep) == 3


def test_components_go_from_a_rollout_to_its_step(lake: Lake) -> None:
    """What a step consumed is held against its rollout, or taken from there."""
    shares, settings = _shares(), with_changes(PLAIN, APART)
    _take_apart(shares, missing=False)
    trainer = ComposedTrainer(settings, shares)
    trainer.score()
    trainer.estimate()
    both: dict[str, Any] = {"settings": settings, "stages": STAGES, "columns": COLUMNS}
    capture(lake, shares, WAY, **both)
    capture(lake, shares, WAY, step_id=0, without=("reward_components",), **both)
    assert lake.replay().verdict == "pass"
    _parts(shares[0][1])["answer"] += 1.0
    capture(lake, shares, WAY, step_id=1, **both)
    cohort = the_cohort(Lake.open(lake.path).replay(), step_id=1)
    assert cohort.first_divergent_stage == "sample"
    (finding,) = (one for one in cohort.findings if one.check == "handoff.reward_components")
    assert "reward_components of s-1 component 0: the step consumed 1.25" in finding.message


@pytest.mark.parametrize(
    "changes", [PARTS, {**PARTS, "reward.missing": "exclude"}, {"reward.source": "token"}]
)
def test_exact_reaches_the_sums_of_components_and_of_tokens(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    def whole(samples: Samples) -> None:
        for one in samples:
            one.components = one.components if "reward.weights" in changes else None

    def bit_off(samples: Samples) -> None:
        whole(samples)
        raw = torch.tensor(samples[3].raw_reward, dtype=torch.float32)
        samples[3].raw_reward = float(torch.nextafter(raw, torch.tensor(99.0)))

    found = []
    for name, spoil in (("as summed", whole), ("off", bit_off)):
        lake = Lake.create(tmp_path / name)
        _write(lake, changes, spoil)
        reports = (lake.replay(exact=exact) for exact in (False, True))
        found += [the_stage(the_cohort(one), RAW) for one in reports]
    assert [one.verdict for one in found] == ["pass", "pass", "pass", "precision"]
    assert found[-1].message.startswith("1 of 8 samples agree and do not have the bits")

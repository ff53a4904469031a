"""Explanations across a run: what is one line, since when it holds, and at which ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.scenes import WAY, drawn, write_rollout, write_step
from tests.helpers.trainer import Arithmetic, Sample
from trajreplay import Lake
from trajreplay.query import Cohort
from trajreplay.stages.explain import Explained, clusters
from trajreplay.stages.explain.findings import unnamed_findings
from trajreplay.stages.report import CohortReport, Finding, Report

SCORED = ("sample", "reward.raw", "reward.post_process")
_UNDIVIDED = replace(WAY, std=False)


def _many(way: Arithmetic = WAY, rollout: int = 0) -> list[Sample]:
    """Four times the samples of a scene: more than a stage lists of what differs."""
    whole = []
    for copy in range(4):
        for one in drawn(way, rollout_id=rollout):
            one.sample_id, one.group = f"{one.sample_id}-{copy}", f"{one.group}-{copy}"
            whole.append(one)
    return whole


@pytest.mark.parametrize("wrong", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)])
def test_ranks_are_named_of_all_that_differs_and_only_where_others_are_right(
    lake: Lake, wrong: tuple[int, ...]
) -> None:
    """However many samples are wrong: a stage lists its first ten divergences."""
    for rollout in range(2):
        right, other = _many(rollout=rollout), _many(_UNDIVIDED, rollout)
        bounds = (0, 12, 16, 32)  # whole groups on each rank
        shares = {
            rank: (other if rank in wrong else right)[bounds[rank] : bounds[rank + 1]]
            for rank in range(3)
        }
        write_rollout(lake, shares, WAY, settings=WAY.full, stages=SCORED)
    (found,) = clusters(lake.explain())
    named = ", ".join(map(str, wrong))
    where = f", at rank{'s' if len(wrong) > 1 else ''} {named}" if len(wrong) < 3 else ""
    assert found.when == f"always{where}"
    (first, *_) = lake.replay().cohorts
    (stage,) = [one for one in first.stages if one.stage == "reward.post_process"]
    assert stage.ranks == list(wrong)


@pytest.mark.parametrize(
    ("wrong", "when"),
    [
        ((0, 1, 2, 3), "always"),
        ((2,), "once, at rollout 2 (weight version 12)"),
        ((2, 3), "since rollout 2 (weight version 12)"),
        ((1, 3), "now and then, first at rollout 1 (weight version 11)"),
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_when_an_explanation_holds_is_said_with_the_weights_of_its_first_cohort(
    lake: Lake, wrong: tuple[int, ...], when: str, checked: bool
) -> None:
    """Of what a check finds as of what is recomputed."""
    for rollout in range(4):
        bad = rollout in wrong
        way = _UNDIVIDED if bad and not checked else WAY
        samples = drawn(way, rollout_id=rollout)
        if bad and checked:
            samples[0].columns["rollout_log_probs"][0] = 0.5
        for one in samples:
            one.weight_versions = [(0, one.length, 10 + rollout)]
        write_rollout(lake, samples, WAY, settings=WAY.full, stages=SCORED)
    found = [one for one in clusters(lake.explain()) if one.stage != "sample" or checked]
    (said,) = [one for one in found if one.faults[0] != "weights.mixed"]
    assert said.when == when
    assert said.told == checked


@pytest.mark.parametrize(
    ("versions", "wrong", "when"),
    [
        ((10, 10, 12, 10, 12, 12), {12}, "since weight version 12, first at rollout 2"),
        ((10, 13, 12, 10, 11, 12), {12, 13}, "since weight version 12, first at rollout 1"),
        ((10, 13, 12, 10, 12, 12), {12}, "now and then, first at rollout 2 (weight version 12)"),
        # Of what is not recorded, the weights may be any.
        ((10, None, 12, 10, 12, 12), {12}, "now and then, first at rollout 2 (weight version 12)"),
    ],
)
def test_what_begins_with_a_weight_version_is_said_where_cohorts_of_others_lie_between(
    lake: Lake, versions: tuple[int | None, ...], wrong: set[int], when: str
) -> None:
    for rollout, version in enumerate(versions):
        samples = drawn(_UNDIVIDED if version in wrong else WAY, rollout_id=rollout)
        for one in samples:
            one.weight_versions = None if version is None else [(0, one.length, version)]
        write_rollout(lake, samples, WAY, settings=WAY.full, stages=SCORED)
    (found,) = clusters(lake.explain())
    assert found.when == when


def test_what_a_handoff_changed_is_said_with_the_weights_of_its_rollout(lake: Lake) -> None:
    for rollout in range(3):
        samples = drawn(rollout_id=rollout)
        for one in samples:
            one.weight_versions = [(0, one.length, 20 + rollout)]
        write_rollout(lake, {0: samples})
        consumed = [one.copy() for one in samples]
        for one in consumed:
            one.weight_versions = None
            if rollout:
                old = one.columns["old_log_probs"]
                one.columns["old_log_probs"] = old.bfloat16().float()
        write_step(lake, {0: consumed}, rollout_id=rollout, stages=["sample"], expected={})
    found = [one for one in clusters(lake.explain()) if not one.warns]
    assert [one.when for one in found] == ["since rollout 1 step 0 (weight version 21)"]


def test_a_fault_that_a_restart_brought_is_said_to_be_of_it(lake: Lake) -> None:
    for rollout, attempt in ((0, 0), (1, 0), (2, 1), (3, 1)):
        samples = drawn(_UNDIVIDED if attempt else WAY, rollout_id=rollout)
        options = {"resumed_from": (0, 2)} if attempt else {}
        write_rollout(
            lake,
            samples,
            WAY,
            settings=WAY.full,
            stages=SCORED,
            attempt=attempt,
            **options,
        )
    (found,) = clusters(lake.explain())
    assert found.when == "since the restart as attempt 1"


def test_errors_that_are_not_alike_are_no_one_line(lake: Lake) -> None:
    """A factor, an offset and noise: none of them is known, and each has a line of its own."""
    for rollout in range(6):
        samples = drawn(rollout_id=rollout)
        numbers = np.random.default_rng(rollout)
        for one in samples:
            assert one.reward is not None
            wrong = (
                one.reward * (1.3125 + rollout / 64),
                one.reward + 0.34375 + rollout / 64,
                one.reward + float(numbers.normal(0, 0.5)),
            )[rollout % 3]
            one.reward = float(np.float32(wrong))
        write_rollout(lake, samples, WAY, settings=WAY.full, stages=SCORED)
    found = clusters(lake.explain())
    assert [[one.rollout_id for one in line.cohorts] for line in found] == [[0, 3], [1, 4], [2, 5]]
    assert [
        next((one for one in ("a constant factor", "a constant offset") if one in line.text), "")
        for line in found
    ] == ["a constant factor", "a constant offset", ""]


def _scaled(factor: float, few: int) -> Callable[[list[Sample], int], list[Sample]]:
    """Rewards below 0 that are scaled, of all samples or of the first few of them."""

    def spoil(samples: list[Sample], rollout: int) -> list[Sample]:
        negative = [one for one in samples if one.reward is not None and one.reward < 0]
        numbers = np.random.default_rng(rollout)
        for one in negative[: few if rollout % 2 else None]:
            assert one.reward is not None
            one.reward = float(np.float32(one.reward * factor * numbers.uniform(1.0, 2.0)))
        return samples

    return spoil


def _noisy(samples: list[Sample], rollout: int) -> list[Sample]:
    """Noise on so few samples that any of their errors lie in a part of all by chance."""
    numbers = np.random.default_rng(rollout)
    for row in numbers.choice(len(samples), 1 + rollout % 3, replace=False):
        reward = samples[row].reward
        assert reward is not None
        samples[row].reward = float(np.float32(reward + numbers.normal(0.5, 0.1)))
    return samples


@pytest.mark.parametrize("spoil", [_scaled(3.0, 2), _noisy])
def test_one_cause_that_nothing_explains_is_one_line(
    lake: Lake, spoil: Callable[[list[Sample], int], list[Sample]]
) -> None:
    """Also where few values are wrong, whose error is of no shape for certain."""
    for rollout in range(4):
        samples = spoil(_many(rollout=rollout), rollout)
        write_rollout(lake, samples, WAY, settings=WAY.full, stages=SCORED)
    (found,) = [one for one in clusters(lake.explain()) if one.stage == "reward.post_process"]
    assert len(found.cohorts) == 4
    assert not found.faults


def test_findings_of_one_check_are_one_line_whatever_they_say() -> None:
    report = Report([CohortReport("r", 0, number, None, [0]) for number in range(3)])
    explained = Explained(report)
    for one, name in zip(report.cohorts, ("alpha", "beta", "gamma"), strict=True):
        for check in ("plugin.check", "plugin.other"):
            message = f"the column of {name} is not as {name[::-1]} has it"
            one.findings.append(Finding(check, "error", message, stage="sample"))
        place = Cohort("r", 0, one.rollout_id, None)
        explained.explanations += unnamed_findings(one, place, (), ())
    assert [len(one.cohorts) for one in clusters(explained)] == [3, 3]


def test_cohorts_that_two_faults_give_are_of_the_one_that_gives_the_others_too(
    lake: Lake,
) -> None:
    """All samples as one group, where every other rollout is one consumer batch."""
    for rollout in range(4):
        samples = drawn(rollout_id=rollout)
        raw = np.array([one.raw_reward for one in samples])
        scored = (raw - raw.mean()) / (raw.std(ddof=1) + 1e-6)
        for row, (one, reward) in enumerate(zip(samples, scored, strict=True)):
            one.reward = float(np.float32(reward))
            one.consumer_batch_id = "cb-0" if rollout % 2 == 0 else f"cb-{row // 4}"
        write_rollout(lake, samples, WAY, settings=WAY.full, stages=SCORED)
    (found,) = [one for one in clusters(lake.explain()) if not one.warns]
    assert found.faults == ("reward.grouped-by-batch",)
    assert len(found.cohorts) == 4
    assert "all 8 samples" in found.sentence
    assert f"recorded values equal {found.sentence}" in found.example

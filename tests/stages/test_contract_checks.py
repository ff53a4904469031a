"""Contract checks: what is wrong is found by name and place, and nothing of what is healthy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.cohorts import capture
from tests.helpers.scenes import WAY
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake
from trajreplay.schema import Settings
from trajreplay.stages import Finding

STAGES = ("sample", "reward.raw", "reward.post_process", "advantage.estimate")
COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "advantages")


def _samples(seed: int = 0, *, size: int = 8, length: int = 12) -> list[Sample]:
    """Samples whose trainer and sampler agree but for a little noise."""
    numbers = np.random.default_rng(seed)
    samples = []
    for row in range(size):
        one = Sample(f"s-{row}", f"g-{row // 4}", [1] * length, float(numbers.random()))
        base = -np.abs(numbers.normal(0.0, 1.0, length)) - 1e-3
        for name, spread in (("rollout_log_probs", 0.002), ("old_log_probs", 0.0)):
            values = np.minimum(base + numbers.normal(0.0, spread, length), -1e-6)
            one.columns[name] = torch.tensor(values, dtype=torch.float32)
        one.columns["ref_log_probs"] = one.columns["old_log_probs"] - 0.1
        samples.append(one)
    trainer = Trainer(WAY)
    trainer.score(samples)
    trainer.estimate(samples)
    return samples


def _findings(lake: Lake, samples: Sequence[Sample], **options: Any) -> list[Finding]:
    """What a replay finds of a rollout over two ranks, groups whole on each."""
    shares = options.pop("shares", {0: samples[:4], 1: samples[4:]})
    options.setdefault("settings", WAY.full)
    capture(lake, shares, WAY, columns=COLUMNS, **{"stages": STAGES, **options})
    (cohort,) = lake.replay().cohorts
    return [one for one in cohort.findings if one.check != "handoff"]


def _each(change: Callable[[Sample, torch.Tensor], torch.Tensor]) -> Callable[[list[Sample]], None]:
    def spoil(samples: list[Sample]) -> None:
        for one in samples:
            name = "rollout_log_probs"
            one.columns[name] = change(one, one.columns[name])

    return spoil


def _late(samples: list[Sample]) -> None:
    for one in samples:
        values = one.columns["rollout_log_probs"]
        one.columns["rollout_log_probs"] = torch.cat([values[:1], values[:-1]])


def _early(samples: list[Sample]) -> None:
    for one in samples:
        values = one.columns["rollout_log_probs"]
        one.columns["rollout_log_probs"] = torch.cat([values[1:], values[-1:]])


def _cut_at_borders(samples: list[Sample]) -> None:
    """One value too many at the front of all, and each sample cut by its length."""
    for share in (samples[:4], samples[4:]):
        flat = torch.cat([one.columns["rollout_log_probs"] for one in share])
        flat = torch.cat([flat[:1], flat[:-1]])
        for number, one in enumerate(share):
            part = flat[number * one.length : (number + 1) * one.length]
            one.columns["rollout_log_probs"] = part


def _permuted(samples: list[Sample]) -> None:
    columns = [one.columns["rollout_log_probs"] for one in samples]
    for one, values in zip(samples, columns[2:] + columns[:2], strict=True):
        one.columns["rollout_log_probs"] = values


def _most_likely(samples: list[Sample]) -> None:
    """Two in five tokens were not the most likely ones: those are recorded as if they were."""
    for number, one in enumerate(samples):
        numbers = np.random.default_rng(number)
        other = torch.from_numpy(numbers.random(one.length) < 0.4)
        likely = torch.full((one.length,), -0.05)
        old = one.columns["old_log_probs"]
        old[other] = old[other] - 1.0
        one.columns["rollout_log_probs"] = torch.where(other, likely, old)


def _filtered(samples: list[Sample]) -> None:
    for number, one in enumerate(samples):
        kept = torch.from_numpy(np.random.default_rng(number).uniform(0.7, 0.95, one.length)).log()
        one.columns["old_log_probs"] = (one.columns["rollout_log_probs"] + kept).float()
        one.columns["ref_log_probs"] = one.columns["old_log_probs"] - 0.1


def _one_value(column: str, value: float) -> Callable[[list[Sample]], None]:
    def spoil(samples: list[Sample]) -> None:
        samples[2].columns[column][5] = value

    return spoil


def _duplicated(samples: list[Sample]) -> None:
    samples[3].columns["rollout_log_probs"] = samples[1].columns["rollout_log_probs"].clone()


def _doubled(samples: list[Sample]) -> None:
    for one, other in zip(samples[:4], samples[4:], strict=True):
        for name in COLUMNS[:3]:
            other.columns[name] = one.columns[name].clone()


SPOILT: dict[str, tuple[Callable[[list[Sample]], None], str, str]] = {
    "late": (_late, "log-prob.shifted", "error"),
    "early": (_early, "log-prob.shifted", "error"),
    "cut at packed borders": (_cut_at_borders, "log-prob.packed-shift", "error"),
    "permuted": (_permuted, "sample.permuted", "error"),
    "most likely": (_most_likely, "log-prob.most-likely", "warning"),
    "filtered": (_filtered, "log-prob.filtered", "warning"),
    "above 0": (_one_value("rollout_log_probs", 0.25), "log-prob.positive", "warning"),
    "filled in": (_one_value("rollout_log_probs", 0.0), "log-prob.zero", "warning"),
    "bfloat16": (
        _each(lambda one, values: values.bfloat16().float()),
        "log-prob.quantised",
        "warning",
    ),
    "float16": (_each(lambda one, values: values.half().float()), "log-prob.quantised", "warning"),
    "temperature": (_each(lambda one, values: values * 0.6), "log-prob.temperature", "warning"),
    "duplicated": (_duplicated, "sample.duplicated", "warning"),
    "doubled": (_doubled, "rank.doubled", "error"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_wrong_is_found_by_name(lake: Lake, name: str) -> None:
    spoil, check, severity = SPOILT[name]
    samples = _samples()
    spoil(samples)
    found = [one for one in _findings(lake, samples) if one.check == check]
    assert [one.severity for one in found] == [severity]
    assert found[0].stage == "sample"


@pytest.mark.parametrize("name", ["above 0", "filled in"])
def test_the_token_is_named(lake: Lake, name: str) -> None:
    spoil, check, _ = SPOILT[name]
    samples = _samples()
    spoil(samples)
    (found,) = [one for one in _findings(lake, samples) if one.check == check]
    assert (found.sample_id, found.token) == ("s-2", 5)


def test_an_error_makes_the_stage_diverge_and_a_warning_does_not(lake: Lake) -> None:
    samples = _samples()
    _late(samples)
    _findings(lake, samples)
    (cohort,) = lake.replay().cohorts
    assert cohort.first_divergent_stage == "sample"
    other = Lake.create(f"{lake.path}-other")
    samples = _samples()
    _one_value("rollout_log_probs", 0.25)(samples)
    _findings(other, samples)
    assert other.replay().verdict == "pass"


def test_rewards_of_the_size_of_1_over_epsilon_are_found(lake: Lake) -> None:
    samples = _samples()
    samples[1].reward = 800000.0
    found = {one.check: one for one in _findings(lake, samples)}
    assert found["reward.near-epsilon"].sample_id == "s-1"


def test_constant_groups_that_are_not_scored_0_are_found(lake: Lake) -> None:
    samples = _samples()
    for one in samples[:4]:
        one.raw_reward, one.reward = 0.1, -0.0074
    found = {one.check: one for one in _findings(lake, samples, stages=["sample"])}
    assert found["group.constant"].sample_id == "s-0"


def test_a_part_of_a_group_may_well_be_constant(lake: Lake) -> None:
    samples = _samples()
    for one in samples[:2]:
        one.raw_reward, one.reward = 0.1, -0.0074
    shares = {0: samples[:2], 1: samples[4:]}
    found = _findings(lake, samples, stages=["sample"], shares=shares)
    assert "group.constant" not in {one.check for one in found}


def test_a_nan_hides_no_log_prob_above_0(lake: Lake) -> None:
    samples = _samples()
    samples[0].columns["ref_log_probs"][0] = float("nan")
    samples[1].columns["ref_log_probs"][3] = 0.5
    found = {one.check: one for one in _findings(lake, samples, stages=["sample"])}
    assert (found["log-prob.positive"].sample_id, found["log-prob.positive"].token) == ("s-1", 3)


def test_what_differs_little_is_no_shift(lake: Lake) -> None:
    """A drift of the policy moves log-probs by more than the sampler's noise, and shifts none."""
    samples = _samples()
    for number, one in enumerate(samples):
        drift = np.random.default_rng(number).normal(0.0, 0.4, one.length)
        values = one.columns["old_log_probs"] + torch.from_numpy(drift).float()
        one.columns["rollout_log_probs"] = values.clamp(max=-1e-4)
    assert [one for one in _findings(lake, samples) if one.severity == "error"] == []


def test_settings_are_only_read(lake: Lake) -> None:
    """Defaults have everything that the checks ask for."""
    assert _findings(lake, _samples(), settings=Settings()) == []


def test_a_deep_validation_checks_every_cohort(lake: Lake) -> None:
    samples = _samples()
    _late(samples)
    _findings(lake, samples)
    assert lake.validate().ok
    report = lake.validate(deep=True)
    assert not report.ok
    (found,) = report.findings
    assert (found.severity, found.check) == ("error", "log-prob.shifted")
    assert found.message.startswith("run 'r' rollout 0 s-0 token ")

"""Trainings that compute in float32, under every profile: no alarm, and a fault stays one."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import capture
from tests.helpers.float32_trainer import Float32Trainer
from tests.helpers.healthy_composed import Draw, Drawn, judged
from tests.helpers.scenes import WAY, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_composed import CHANGES, STAGES
from trajreplay import AdvantageSettings, Lake, RewardSettings, Settings, with_changes
from trajreplay.schema.settings import PROFILES
from trajreplay.stages import CohortReport

NAMED = {name: changes for name, (changes, _) in CHANGES.items()}
REWARD, ESTIMATE = "reward.post_process", "advantage.estimate"
SCORED = ("sample", "reward.raw", REWARD, "advantage.kl", ESTIMATE)
COHORTS = 6


@given(st.integers(0, 2**32), st.sampled_from([None, *PROFILES]))
def test_a_training_in_float32_raises_no_alarm(seed: int, profile: str | None) -> None:
    draw = Draw(seed, NAMED, STAGES, hard=True)
    settings = draw.settings(profile)
    drawn: list[Drawn] = []
    for _ in range(COHORTS):
        shares = draw.shares(settings)
        trainer = Float32Trainer(settings, shares)
        trainer.score()
        trainer.estimate()
        drawn.append((shares, {}))
    with tempfile.TemporaryDirectory() as folder:
        for cohort in judged(Path(folder) / "lake", settings, drawn, SCORED):
            assert cohort.verdict in ("pass", "precision"), (settings, cohort.to_json())
            assert all(one.compared for one in cohort.stages)


def _scored(
    lake: Lake, settings: Settings, raw: list[float], reward: torch.Tensor, groups: int = 1
) -> CohortReport:
    """What is said of samples with these rewards, in groups one after the other."""
    samples = []
    for row, (before, after) in enumerate(zip(raw, reward.tolist(), strict=True)):
        one = Sample(f"s-{row}", f"g-{row * groups // len(raw)}", [1, 1], before)
        one.reward = after
        one.columns["advantages"] = one.columns["returns"] = torch.full((2,), after)
        samples.append(one)
    capture(
        lake,
        {0: samples},
        WAY,
        step_id=0,
        stages=("sample", "reward.raw", REWARD, ESTIMATE),
        columns=("advantages", "returns"),
        settings=settings,
    )
    return the_cohort(lake.replay())


PLAIN = {
    "reward.grouping": "group",
    "reward.n_samples_per_prompt": None,
    "kl.coef": 0.0,
    "advantage.kl_in_reward": False,
}


def _divided(raw: torch.Tensor, epsilon: float, *, centred: bool) -> torch.Tensor:
    distance = raw - raw.mean()
    return distance / ((distance if centred else raw).std() + epsilon)


@pytest.mark.parametrize(
    ("profile", "epsilon"),
    [("verl", 1e-6), ("trl", 1e-4), ("openrlhf", 1e-9), ("slime", 1e-6), ("relax", 1e-6)],
)
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7])
def test_a_constant_group_over_epsilon_is_precision_with_a_warning(
    lake: Lake, profile: str, epsilon: float, value: float
) -> None:
    settings = with_changes(PROFILES[profile].settings, PLAIN)
    raw = torch.full((8,), value)
    reward = _divided(raw, epsilon, centred=profile in ("slime", "relax"))
    assert float(reward.abs().max()) > 1e-5
    cohort = _scored(lake, settings, raw.tolist(), reward)
    assert the_stage(cohort, REWARD).verdict == "precision", cohort.to_json()
    assert "group.constant" in {one.check for one in cohort.findings}


@pytest.mark.parametrize(
    "changes",
    [
        {"reward.grouping": "stride", "reward.n_samples_per_prompt": 8},
        {"reward.grouping": "batch"},
        {"reward.std_grouping": "batch"},
        {"reward.epsilon_place": "floored", "reward.epsilon": 1e-12},
    ],
)
def test_the_warning_of_constant_groups_covers_every_grouping(
    lake: Lake, changes: Mapping[str, Any]
) -> None:
    settings = with_changes(Settings(), {**PLAIN, **changes})
    raw = torch.full((8,), 0.3)
    cohort = _scored(lake, settings, raw.tolist(), _divided(raw, 1e-6, centred=True))
    assert the_stage(cohort, REWARD).verdict == "precision", cohort.to_json()
    assert [one.check for one in cohort.findings].count("group.constant") == 1


@pytest.mark.parametrize("profile", ["verl", "trl", "openrlhf", "slime"])
def test_rewards_far_from_0_for_their_spread_are_precision(lake: Lake, profile: str) -> None:
    settings = with_changes(PROFILES[profile].settings, PLAIN)
    raw = 100.0 + torch.tensor([0.0, 1.0, 2.0, 3.0, -1.0, -2.0, 0.0, 1.0]) / 1000.0
    reward = _divided(raw, settings.reward.epsilon, centred=profile == "slime")
    stage = the_stage(_scored(lake, settings, raw.tolist(), reward), REWARD)
    assert stage.verdict == "precision", stage


MIXED = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.1, 0.9, 0.3, 0.4, 0.2, 0.7, 0.8, 0.5]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_reward_a_little_beyond_its_bound_has_diverged(tmp_path: Path, profile: str) -> None:
    """Rewards of 0 and 1, and tenths: what is off by 1e-4 is no rounding of any profile."""
    settings = with_changes(
        PROFILES[profile].settings, {"reward.n_samples_per_prompt": 8, "kl.coef": 0.0}
    )
    samples = [Sample(f"s-{row}", f"g-{row // 8}", [1, 1], raw) for row, raw in enumerate(MIXED)]
    Float32Trainer(settings, {0: samples}).score()
    for off, verdicts in ((0.0, ("pass",)), (1e-4, ("diverged",))):
        reward = torch.tensor([(one.reward or 0.0) * (1.0 + off) for one in samples])
        raw = [one.raw_reward for one in samples]
        cohort = _scored(Lake.create(tmp_path / str(off)), settings, raw, reward, 2)
        assert the_stage(cohort, REWARD).verdict in verdicts, cohort.to_json()


GAE = Settings(reward=RewardSettings(grouping="none"), advantage=AdvantageSettings(estimator="gae"))


def _gae(count: int, length: int) -> list[Sample]:
    """Samples of a critic's training that adds up token by token in float32."""
    numbers = torch.Generator().manual_seed(0)
    samples = []
    for row in range(count):
        one = Sample(f"s-{row}", "g-0", [1] * length, float(row % 2))
        one.reward = one.raw_reward
        values = torch.randn(length, generator=numbers) * 0.5 + 0.5
        advantages = torch.zeros(length)
        state, following = torch.tensor(0.0), torch.tensor(0.0)
        for t in reversed(range(length)):
            reward = torch.tensor(one.reward if t == length - 1 else 0.0)
            state = (reward + following - values[t]) + state
            following, advantages[t] = values[t], state
        one.columns.update(old_values=values, advantages=advantages, returns=advantages + values)
        samples.append(one)
    return samples


@pytest.mark.parametrize(
    ("place", "off", "verdict"),
    [(0, 0.0, "precision"), (0, 2e-3, "diverged"), (4000, 1e-4, "diverged")],
)
def test_long_sums_of_a_critic_are_precision_and_a_fault_in_them_is_found(
    lake: Lake, place: int, off: float, verdict: str
) -> None:
    samples = _gae(4, 4096)
    samples[1].columns["advantages"][place] += off
    capture(
        lake,
        {0: samples},
        WAY,
        step_id=0,
        stages=("sample", ESTIMATE),
        columns=("old_values", "advantages", "returns"),
        settings=GAE,
    )
    assert the_stage(the_cohort(lake.replay()), ESTIMATE).verdict == verdict


@pytest.mark.parametrize(
    ("one_pass", "mean", "off"),
    [(True, 30.0, 0.5), (False, 30.0, 1e-3), (True, 0.5, 1e-3), (False, 0.5, 2e-4)],
)
def test_whitening_in_float32_is_no_fault_and_a_fault_in_it_is_found(
    tmp_path: Path, mean: float, off: float, *, one_pass: bool
) -> None:
    settings = Settings(
        reward=RewardSettings(grouping="none"),
        advantage=AdvantageSettings(
            reward_source="token",
            whiten="cohort",
            whiten_one_pass=one_pass,
            whiten_short="biased" if one_pass else "raise",
        ),
    )
    numbers = torch.Generator().manual_seed(0)
    samples = []
    for row in range(8):
        one = Sample(f"s-{row}", "g-0", [1] * 256, 0.0)
        one.reward = 0.0
        one.columns["token_rewards"] = mean + 0.3 * torch.randn(256, generator=numbers)
        one.columns["old_log_probs"] = one.columns["ref_log_probs"] = torch.zeros(256)
        samples.append(one)
    Float32Trainer(settings, {0: samples}).estimate()
    for wrong in (0.0, off):
        own = Lake.create(tmp_path / f"{wrong}")
        for one in samples:
            one.columns["advantages"] = one.columns["advantages"] * (1.0 + wrong)
        capture(
            own,
            {0: samples},
            WAY,
            step_id=0,
            stages=("sample", ESTIMATE),
            columns=("token_rewards", "advantages", "returns"),
            settings=settings,
        )
        found = the_stage(the_cohort(own.replay()), ESTIMATE).verdict
        assert found in (("diverged",) if wrong else ("pass", "precision"))


ONE_PASS = {
    "reward.grouping": "none",
    "advantage.estimator": "grpo",
    "advantage.whiten": "cohort",
}


def _nearly_equal(seed: int, spread: float) -> list[Sample]:
    """Samples of rewards that differ little for their mean, and what one pass makes of them."""
    numbers = torch.Generator().manual_seed(seed)
    rewards = 0.3 + spread * torch.randn(8, generator=numbers)
    samples = [Sample(f"s-{row}", "g-0", [1] * (30 + 7 * row), 0.0) for row in range(8)]
    for one, reward in zip(samples, rewards.tolist(), strict=True):
        one.raw_reward = one.reward = reward
    lengths = torch.tensor([one.length for one in samples])
    every = rewards.repeat_interleave(lengths)
    count, mean = len(every), every.sum() / len(every)
    variance = ((every * every).sum() / count - mean * mean) * count / (count - 1)
    whitened = (every - mean) * torch.rsqrt(variance + 1e-8)
    for one, own in zip(samples, torch.split(whitened, lengths.tolist()), strict=True):
        one.columns["advantages"] = one.columns["returns"] = own
    return samples


@pytest.mark.parametrize("profile", ["slime", "relax"])
@pytest.mark.parametrize("spread", [1e-3, 1e-4, 1e-5])
def test_a_small_spread_whitened_in_one_pass_is_no_fault(
    lake: Lake, profile: str, spread: float
) -> None:
    """The trainer's own variance comes out larger, smaller, and now and then negative."""
    settings = with_changes(PROFILES[profile].settings, ONE_PASS)
    undefined = []
    for number in range(20):
        samples = _nearly_equal(number, spread)
        undefined.append(bool(samples[0].columns["advantages"].isnan().any()))
        stages = ("sample", "reward.raw", REWARD, ESTIMATE)
        capture(
            lake,
            {0: samples},
            WAY,
            rollout_id=number,
            stages=stages,
            columns=("advantages",),
            settings=settings,
        )
    assert any(undefined) == (spread < 1e-3)
    cohorts = lake.replay().cohorts
    assert len(cohorts) == len(undefined)
    for cohort, is_nan in zip(cohorts, undefined, strict=True):
        verdict = the_stage(cohort, ESTIMATE).verdict
        assert verdict in (("diverged",) if is_nan else ("pass", "precision")), cohort.to_json()
        said = "advantage.negative-variance" in {one.check for one in cohort.findings}
        assert said == is_nan


@pytest.mark.parametrize("reward", [-1.0, -0.7, 0.3, 1e-4])
@pytest.mark.parametrize("whitens", [True, False])
def test_equal_rewards_whitened_in_one_pass_hide_no_advantage(
    lake: Lake, reward: float, whitens: bool
) -> None:
    """A batch that failed altogether has advantages of 0, and not those that were put in."""
    settings = with_changes(PROFILES["slime"].settings, ONE_PASS)
    samples = [Sample(f"s-{row}", "g-0", [1] * 8, reward) for row in range(8)]
    every = torch.full((64,), reward)
    mean = every.sum() / 64
    variance = ((every * every).sum() / 64 - mean * mean) * 64 / 63
    made = (every - mean) * torch.rsqrt(variance + 1e-8) if whitens else every
    for one, own in zip(samples, torch.split(made, 8), strict=True):
        one.reward = reward
        one.columns["advantages"] = one.columns["returns"] = own
    stages = ("sample", "reward.raw", REWARD, ESTIMATE)
    capture(lake, {0: samples}, WAY, stages=stages, columns=("advantages",), settings=settings)
    (cohort,) = lake.replay().cohorts
    verdicts = ("pass", "precision") if whitens else ("diverged",)
    assert the_stage(cohort, ESTIMATE).verdict in verdicts


def test_what_one_pass_leaves_open_hides_no_other_advantage(lake: Lake) -> None:
    """All tokens of a set share a divisor, however little is known of it."""
    settings = with_changes(PROFILES["slime"].settings, ONE_PASS)
    samples = _nearly_equal(0, 1e-4)
    own = samples[2].columns["advantages"]
    samples[2].columns["advantages"] = own * -1.0
    stages = ("sample", "reward.raw", REWARD, ESTIMATE)
    capture(lake, {0: samples}, WAY, stages=stages, columns=("advantages",), settings=settings)
    (cohort,) = lake.replay().cohorts
    assert the_stage(cohort, ESTIMATE).verdict == "diverged"

"""What V1's kernel scores, the composed one scores too, wherever either may be taken."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajreplay import Lake, RewardSettings, SampleRecord, Settings, with_changes
from trajreplay.stages.capability import is_plain
from trajreplay.stages.compose import RewardInputs, processed_rewards
from trajreplay.stages.kernels import group_rewards

PLAIN = st.builds(
    RewardSettings,
    baseline=st.sampled_from(["mean", "none"]),
    divide_by_std=st.booleans(),
    ddof=st.integers(0, 1),
    epsilon=st.sampled_from([0.0, 1e-9, 1e-6, 1e-2]),
)
REWARDS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, 0.3, 2.0]) | st.floats(-5.0, 5.0)),
    min_size=1,
    max_size=10,
)


@given(PLAIN, REWARDS)
def test_plain_and_composed_rewards_are_equal_wherever_both_can_be_taken(
    settings: RewardSettings, samples: list[tuple[int, float]]
) -> None:
    groups = torch.tensor([group for group, _ in samples])
    raw = torch.tensor([reward for _, reward in samples], dtype=torch.float64)
    given = RewardInputs(groups, groups * 0, torch.ones_like(groups), torch.ones_like(raw))
    composed = processed_rewards(settings, raw, given)
    assert composed.isfinite().all()
    if is_plain("reward.post_process", Settings(reward=settings)):
        plain = group_rewards(
            raw,
            groups,
            baseline=settings.baseline,
            divide_by_std=settings.divide_by_std,
            ddof=settings.ddof,
            epsilon=settings.epsilon,
        )
        torch.testing.assert_close(plain, composed, rtol=1e-12, atol=1e-12)


def _score(lake: Lake, settings: Settings, rewards: list[tuple[int, float, float]]) -> None:
    with lake.capture(
        run_id="r",
        rollout_id=0,
        rank=0,
        expected_ranks=[0],
        settings=settings,
        stages=["reward.post_process"],
    ) as capture:
        capture.samples(
            [
                SampleRecord(
                    sample_id=f"s-{row}",
                    group_index=group,
                    response_length=1,
                    total_length=2,
                    loss_mask=[1],
                    raw_reward=raw,
                    reward=reward,
                )
                for row, (group, raw, reward) in enumerate(rewards)
            ]
        )


@pytest.mark.parametrize(
    ("reward", "samples"),
    [
        ({"baseline": "none"}, [(0, 2.0, 0.0), (1, 1.0, 2**0.5), (1, 0.0, 0.0)]),
        ({"epsilon": 0.0}, [(0, 0.5, 0.0), (0, 0.5, 0.0)]),
    ],
)
def test_an_unrelated_setting_does_not_change_the_verdict(
    tmp_path: Path, reward: dict[str, Any], samples: list[tuple[int, float, float]]
) -> None:
    plain = with_changes(Settings(), {f"reward.{name}": one for name, one in reward.items()})
    for name, changes in (("narrow", {}), ("wide", {"reward.clip_after": (-1e6, 1e6)})):
        lake = Lake.create(tmp_path / name)
        _score(lake, with_changes(plain, changes), samples)
        assert lake.replay().verdict == "pass"

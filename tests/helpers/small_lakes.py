"""Lakes of a few captures whose verdicts can be told by heart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.captures import record, sample
from trajreplay import Lake, RecomputeConfig

REWARD_STAGES = ("sample", "reward.raw", "reward.post_process")
# Raw rewards 1 and 0: mean 1/2, deviation with divisor n - 1 sqrt(1/2), plus epsilon.
GOOD = 0.5 / (0.5**0.5 + 1e-6)


def rollout(lake: Lake, rollout_id: int = 0, reward: float = GOOD, **options: Any) -> None:
    """One rollout of two samples of one group; any other reward than GOOD is wrong."""
    ids = options.pop("ids", ("s-0", "s-1"))
    samples = [
        sample(0, sample_id=ids[0], raw_reward=1.0, reward=reward),
        sample(1, sample_id=ids[1], raw_reward=0.0, reward=-GOOD),
    ]
    usual: dict[str, Any] = {
        "rollout_id": rollout_id,
        "settings": RecomputeConfig(n_samples_per_prompt=2),
        "stages": REWARD_STAGES,
    }
    record(lake, lambda capture: capture.samples(samples), **usual | options)


def healthy_lake(path: Path, rollouts: int = 2) -> Lake:
    """Rollouts that pass."""
    lake = Lake.create(path)
    for rollout_id in range(rollouts):
        rollout(lake, rollout_id)
    return lake


def faulty_lake(path: Path) -> Lake:
    """Rollouts 0 and 2 pass, the first reward of rollout 1 is wrong."""
    lake = Lake.create(path)
    for rollout_id in range(3):
        rollout(lake, rollout_id, reward=5.5 if rollout_id == 1 else GOOD)
    return lake


def gappy_lake(path: Path) -> Lake:
    """Rollout 0 passes, of rollout 1 the capture of rank 1 is missing."""
    lake = Lake.create(path)
    rollout(lake, 0)
    rollout(lake, 1, expected_ranks=[0, 1])
    return lake

"""What is measured, written twice: into a lake by trajreplay, into directories by the baseline."""

import multiprocessing
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks import baseline, workload
from benchmarks.workload import Step
from trajreplay import Lake, ProducerInfo, RecomputeConfig, SampleRecord

STEPS = 200
CAPTURES = 10_000

STAGES = [
    "sample",
    "reward.raw",
    "reward.post_process",
    "advantage.kl",
    "advantage.estimate",
    "loss.policy",
]
SETTINGS = RecomputeConfig(
    advantage_estimator="grpo",
    n_samples_per_prompt=workload.SAMPLES_PER_PROMPT,
    grpo_std_normalization=True,
    kl_loss_type="k1",
    kl_coef=workload.KL_COEF,
    eps_clip=workload.EPS_CLIP,
    eps_clip_high=workload.EPS_CLIP_HIGH,
    entropy_coef=workload.ENTROPY_COEF,
)
PRODUCER = ProducerInfo(commit="0" * 40, torch_version=torch.__version__)


@dataclass(frozen=True)
class Twins:
    """The same steps in a lake and in a directory tree."""

    lake: Path
    tree: Path


def write_twins(root: Path, draw: Callable[[int], Step], count: int) -> Twins:
    """Write steps as rollouts 0, 1, ... of both, unless an earlier run has left them there.

    Every core appends to the same lake at once: writing is no part of what is measured.
    """
    twins = Twins(root / "lake", root / "tree")
    done = root / "done"
    if not done.exists():
        twins.tree.mkdir(parents=True)
        Lake.create(twins.lake)
        write = partial(_write_both, twins, draw)
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as workers:
            list(workers.map(write, range(count), chunksize=max(1, count // 100)))
        done.touch()
    return twins


def found_step(index: int) -> Step:
    """Draw one of the 10,000 steps among which one is looked for: 8 samples of 64 tokens."""
    return workload.make_step(index, 8, 64)


def _write_both(twins: Twins, draw: Callable[[int], Step], rollout_id: int) -> None:
    step = draw(rollout_id)
    capture_step(Lake.open(twins.lake), rollout_id, step)
    baseline.write_step(twins.tree, rollout_id, step)


def capture_step(
    lake: Lake, rollout_id: int, step: Step, scalars: Mapping[str, float] | None = None
) -> None:
    """Capture one step with all that its six stages read and gave.

    Args:
        lake: Where to.
        rollout_id: Its rollout.
        step: The step.
        scalars: Other recorded outputs of `loss.policy` than those that it gave.
    """
    samples = [
        SampleRecord(
            sample_id=f"s-{row}",
            group_index=int(step.group_index[row]),
            response_length=step.response_length,
            total_length=int(step.prompt_length[row]) + step.response_length,
            loss_mask=step.loss_mask[row].tolist(),
            raw_reward=float(step.raw_reward[row]),
            reward=float(step.reward[row]),
        )
        for row in range(step.samples)
    ]
    with lake.capture(
        run_id="bench",
        rollout_id=rollout_id,
        step_id=0,
        rank=0,
        expected_ranks=[0],
        settings=SETTINGS,
        producer=PRODUCER,
        stages=STAGES,
    ) as capture:
        capture.samples(samples)
        for name, values in step.token_columns().items():
            capture.tensor(name, torch.from_numpy(values))
        recorded = step.scalars if scalars is None else scalars
        capture.expected(
            "loss.policy",
            loss=recorded["loss"],
            pg_loss=recorded["pg_loss"],
            entropy_loss=recorded["entropy_loss"],
            pg_clipfrac=recorded["pg_clipfrac"],
            ppo_kl=recorded["ppo_kl"],
        )


def size_of(directory: Path) -> int:
    """Sum the sizes of all files under a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

"""Measures a replay of the workload through other estimators, losses and profiles, against GRPO's.

python -m benchmarks.estimators [--rounds N] [--steps N] [--only TEXT]

What is recorded is what the stages themselves give, rounded to float32: this measures what they
cost, and says nothing of whether they are right. Processor time, one core, in turn.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.lakes import PRODUCER, STAGES
from benchmarks.run import bind_to_one_core, note, require
from benchmarks.timing import cpu_seconds
from benchmarks.workload import SAMPLES_PER_PROMPT, Step, small_step
from trajreplay import Lake, SampleRecord
from trajreplay.query import Catalog, Selection, select
from trajreplay.schema.entry import Output
from trajreplay.schema.lakefile import open_lake
from trajreplay.schema.settings import PROFILES, Settings, with_changes
from trajreplay.stages.advantages import estimated
from trajreplay.stages.block import Block
from trajreplay.stages.cohort import LoadedCohort
from trajreplay.stages.kl import compare_kl
from trajreplay.stages.rewards import Processed, raw_rewards
from trajreplay.stages.sample_losses import SampleLosses
from trajreplay.stages.whole import WholeCohorts

REACH = 2.0
MICRO_BATCH = 8
GRPO = "grpo"
_MEAN = {"loss.batch_reduction": "mean"}
_WAYS: Mapping[str, dict[str, Any]] = {
    GRPO: {},
    "dr.grpo": {"reward.divide_by_std": False, "loss.aggregation": "seq-mean-token-sum"},
    "rloo": {"reward.baseline": "leave-one-out", "reward.divide_by_std": False},
    "gpg": {"reward.rule": "gpg", "loss.surrogate": "reinforce"},
    "reinforce++": {
        "reward.grouping": "none",
        "advantage.estimator": "reinforce++",
        "advantage.kl_in_reward": True,
        "advantage.whiten": "cohort",
    },
    "reinforce++-baseline": {
        "advantage.estimator": "reinforce++-baseline",
        "advantage.whiten": "cohort",
    },
    "gae": {"advantage.estimator": "gae", "advantage.lam": 0.95, "advantage.whiten": "cohort"},
    "remax": {"advantage.estimator": "remax"},
    "otb": {"advantage.estimator": "otb"},
    "opd": {"advantage.estimator": "opd", "advantage.opd_coef": 0.1},
    "gspo": {"loss.ratio": "sequence-mean"},
    "cispo": {"loss.surrogate": "cispo"},
    "sapo": {"loss.surrogate": "sapo"},
    "gmpo": {"loss.surrogate": "gmpo"},
    "vespo": {"loss.surrogate": "vespo", "loss.old_source": "rollout"},
    "m2po": {"loss.surrogate": "m2po"},
    "kl-cov": {"loss.surrogate": "kl-cov"},
    "dppo": {"loss.surrogate": "dppo"},
    "dro": {"loss.surrogate": "dro"},
    "dual clip": {"loss.dual_clip": 3.0},
    "tis": {"loss.correction": "tis", "loss.correction_bounds": (0.0, 2.0)},
    "geometric mask": {
        "loss.correction": "geometric-mask",
        "loss.correction_bounds": (0.9, 1.1),
    },
    "areal m2 threshold": {"loss.m2_threshold": 0.04},
    "kl loss": {"loss.kl_loss_coef": 0.01, "loss.kl_loss_estimator": "k3"},
    "micro-batch means": {
        "loss.aggregation": "token-mean",
        "loss.mean_over": "micro-batch",
        **_MEAN,
    },
}


@dataclass(frozen=True)
class Way:
    """Settings to replay under, and what the workload records for them."""

    name: str
    settings: Settings

    @property
    def columns(self) -> dict[str, Callable[[Step, np.random.Generator], Any]]:
        """Token columns beside those of the workload, all that any of these settings reads."""
        noise = 0.02
        made: dict[str, Callable[[Step, np.random.Generator], Any]] = {
            "rollout_log_probs": lambda step, draw: np.minimum(
                step.old_log_probs + draw.normal(0, noise, step.entropy.shape), 0.0
            )
        }
        if self.settings.advantage.estimator == "gae":
            made["values"] = lambda step, draw: draw.normal(0, 1, step.entropy.shape)
        if self.settings.advantage.estimator == "otb":
            made["sum_pi_squared"] = lambda step, draw: draw.uniform(0.1, 1, step.entropy.shape)
        if self.settings.advantage.opd_coef:
            made["teacher_log_probs"] = lambda step, draw: step.ref_log_probs
        return made


def main() -> None:
    """Write the workload under each, replay them in turn with GRPO, print the ratios."""
    options = argparse.ArgumentParser(prog="benchmarks.estimators", description=__doc__)
    options.add_argument("--rounds", type=int, default=5, help="pairs a row (default 5)")
    options.add_argument("--steps", type=int, default=8, help="steps a replay (default 8)")
    options.add_argument("--only", default="", help="ways whose name has this in it")
    chosen = options.parse_args()
    bind_to_one_core()
    with tempfile.TemporaryDirectory(prefix="trajreplay-bench-") as scratch:
        grpo, *others = [
            write(Path(scratch), one, chosen.steps)
            for one in ways()
            if one.name == GRPO or chosen.only in one.name
        ]
        print(f"{'way':<24} {'ratio to GRPO (min-max)':>26}  verdict")
        for lake, way in others:
            verdict = replayed(lake)[1]
            ratios = [replayed(lake)[0] / replayed(grpo[0])[0] for _ in range(chosen.rounds)]
            shown = f"{median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
            over = "" if median(ratios) <= REACH else f"  above {REACH:g}x"
            print(f"{way.name:<24} {shown:>26}  {verdict}{over}", flush=True)


def ways() -> list[Way]:
    """What is measured: estimators and losses one by one, and the profiles."""
    base = with_changes(
        Settings(),
        {
            "reward.n_samples_per_prompt": SAMPLES_PER_PROMPT,
            "kl.coef": 0.001,
            "loss.entropy_coef": 0.001,
            "loss.batch_reduction": "sum",
        },
    )
    made = [Way(name, with_changes(base, changes)) for name, changes in _WAYS.items()]
    for name, one in PROFILES.items():
        counted = {"reward.n_samples_per_prompt": SAMPLES_PER_PROMPT}
        made.append(Way(f"profile {name}", with_changes(one.settings, counted)))
    return made


def replayed(lake: Path) -> tuple[float, str]:
    """Processor time of a replay, and its verdict."""
    start = cpu_seconds()
    report = Lake.open(lake).replay()
    return cpu_seconds() - start, report.verdict


def write(root: Path, way: Way, steps: int) -> tuple[Path, Way]:
    """Write the workload with what the stages give of it under some settings."""
    note(way.name)
    drafts, lake = root / f"{way.name} draft", root / way.name
    for path in (drafts, lake):
        Lake.create(path)
    drawn = [small_step(index) for index in range(steps)]
    for index, step in enumerate(drawn):
        _capture(drafts, index, way, step, {}, {})
    catalog = Catalog.open(open_lake(drafts))
    cohorts = WholeCohorts(catalog, select(catalog, Selection()))
    for index, (place, _) in enumerate(cohorts.turns()):
        loaded = cohorts.load(place)
        if not isinstance(loaded, LoadedCohort):
            raise SystemExit(f"benchmarks: {way.name}: {loaded.refusal}")
        columns, scalars = _made(Block([loaded]))
        _capture(lake, index, way, drawn[place.rollout_id], columns, scalars)
    require(replayed(lake)[1] in ("pass", "precision"), f"{way.name} does not agree with itself")
    return lake, way


def _made(block: Block) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The columns and scalars that the stages of one cohort give, one from the other."""
    reward = Processed(block, raw_rewards(block)).values.float().double()
    kl = compare_kl(block)[1].float().double()
    replaced = {"reward": reward, "kl": kl}
    found = {name: one.float().double() for name, one in estimated(block, replaced).items()}
    columns = replaced | {name: found[name] for name in ("advantages", "returns")}
    reads = block.cohorts[0].abilities["loss.policy"].reads
    losses = SampleLosses(
        block, "loss.policy", {name: one for name, one in columns.items() if name in reads}
    )
    every = torch.arange(len(block.packed.lengths))
    reduction = block.settings.loss.batch_reduction
    scalars = {}
    for name in losses.means:
        meant = Output("loss.policy", name, 0.0, scope="rank", reduction=reduction)
        by_batch = losses.denominators.by_batch(meant)
        total = losses.totals(every, by_batch=by_batch)[name]
        scalars[name] = total / losses.denominators.divisor(meant, every)
    return columns, {"scope": "rank", "reduction": reduction, "scale": 1.0, **scalars}


def _capture(
    path: Path,
    index: int,
    way: Way,
    step: Step,
    columns: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    draw = np.random.default_rng(index)
    rewards = columns["reward"].tolist() if columns else step.reward.tolist()
    samples = [
        SampleRecord(
            sample_id=f"s-{row}",
            group_index=int(step.group_index[row]),
            response_length=step.response_length,
            total_length=int(step.prompt_length[row]) + step.response_length,
            loss_mask=step.loss_mask[row].tolist(),
            raw_reward=float(step.raw_reward[row]),
            reward=float(rewards[row]),
            greedy_reward=0.5,
            micro_batch_id=f"mb-{row // MICRO_BATCH:04d}",
        )
        for row in range(step.samples)
    ]
    with Lake.open(path).capture(
        run_id="bench",
        rollout_id=index,
        step_id=0,
        rank=0,
        expected_ranks=[0],
        settings=way.settings,
        producer=PRODUCER,
        stages=STAGES,
    ) as capture:
        capture.samples(samples)
        token_columns: dict[str, Any] = dict(step.token_columns())
        token_columns |= {name: make(step, draw) for name, make in way.columns.items()}
        token_columns |= {"returns": step.advantages.reshape(-1)}
        token_columns |= {name: one for name, one in columns.items() if name != "reward"}
        for name, values in token_columns.items():
            tensor = torch.as_tensor(np.asarray(values, np.float32)).reshape(-1)
            capture.tensor(name, tensor)
        if scalars:
            capture.expected("loss.policy", **scalars)


if __name__ == "__main__":
    main()

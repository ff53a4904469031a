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
from tests.stages.test_composed import CHANGES
from trajreplay import Lake, ParallelCoordinates, SampleRecord
from trajreplay.query import Catalog, Selection, select
from trajreplay.schema.entry import Output
from trajreplay.schema.lakefile import open_lake
from trajreplay.schema.settings import PROFILES, Settings, with_changes
from trajreplay.schema.tables import STEPS
from trajreplay.stages.advantages.estimate import estimated
from trajreplay.stages.advantages.kl import computed_kl
from trajreplay.stages.block import Block
from trajreplay.stages.capability import ability
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.compose import summed_components
from trajreplay.stages.losses.sample_losses import SampleLosses
from trajreplay.stages.outputs import Recorded
from trajreplay.stages.replaying.whole import WholeCohorts
from trajreplay.stages.rewards.post_process import Processed, raw_rewards

REACH = 2.0
WEIGHTS = 7  # the version that trains; its samples are of the two before
VALUE = "loss.value"
MICRO_BATCH = 8
GRPO = "grpo"
# Token columns beside those of the workload, made where a stage reads them.
_COLUMNS: Mapping[str, Callable[[Step, np.random.Generator], Any]] = {
    "rollout_log_probs": lambda step, draw: np.minimum(
        step.old_log_probs + draw.normal(0, 0.02, step.entropy.shape), 0.0
    ),
    "teacher_log_probs": lambda step, draw: step.ref_log_probs,
    "token_rewards": lambda step, draw: draw.normal(0, 0.1, step.entropy.shape),
    "sum_pi_squared": lambda step, draw: draw.uniform(0.1, 1, step.entropy.shape),
    "old_values": lambda step, draw: draw.normal(0, 1, step.entropy.shape),
    "values": lambda step, draw: draw.normal(0, 1, step.entropy.shape),
    "message_faults": lambda step, draw: draw.integers(0, 3, step.entropy.shape),
}
_PARTS = ("answer", "format")
_OF_SAMPLES = ("raw_reward", "reward")


@dataclass(frozen=True)
class Way:
    """Settings to replay under, and the first stage whose numbers they change."""

    name: str
    settings: Settings
    first: str = ""

    @property
    def stages(self) -> list[str]:
        """What is declared: the value loss where that is what differs from GRPO's."""
        return [*STAGES, VALUE] if self.first == VALUE else list(STAGES)

    @property
    def columns(self) -> list[str]:
        """The token columns beside those of the workload that a stage reads."""
        found = (
            ability(stage, self.settings, ParallelCoordinates(), STEPS.names)
            for stage in self.stages
        )
        reads = {name for one in found for name in one.reads}
        return [name for name in _COLUMNS if name in reads]


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
    made = [Way(GRPO, base)]
    for name, (changes, first) in CHANGES.items():
        counted = {"reward.n_samples_per_prompt": _members(changes)}
        made.append(Way(name, with_changes(base, changes | counted), first))
    for name, one in PROFILES.items():
        counted = {"reward.n_samples_per_prompt": SAMPLES_PER_PROMPT}
        made.append(Way(f"profile {name}", with_changes(one.settings, counted)))
    return made


def _members(changes: Mapping[str, Any]) -> int | None:
    """Samples of a prompt; not stated where groups are of other things."""
    if changes.get("reward.unit", "sample") != "sample":
        return None
    stated = changes.get("reward.n_samples_per_prompt", SAMPLES_PER_PROMPT)
    return stated and SAMPLES_PER_PROMPT


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
        columns, scalars = _made(Block([loaded]), way)
        _capture(lake, index, way, drawn[place.rollout_id], columns, scalars)
    require(replayed(lake)[1] in ("pass", "precision"), f"{way.name} does not agree with itself")
    return lake, way


def _made(block: Block, way: Way) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """The columns and, by stage, scalars that the stages of one cohort give, in turn."""
    raw, scored = raw_rewards(block), block.settings.reward
    reward = Processed(block, raw).values.float().double()
    kl = computed_kl(block).values.float().double()
    replaced = {"reward": reward, "kl": kl}
    found = {name: one.float().double() for name, one in estimated(block, replaced).items()}
    if scored.weights:
        raw = summed_components(scored, raw)
    columns = {**replaced, "raw_reward": raw.float().double()}
    columns |= {name: found[name] for name in ("advantages", "returns")}
    losses = [one for one in way.stages if one.startswith("loss.")]
    return columns, {stage: _scalars(block, stage, columns) for stage in losses}


def _scalars(block: Block, stage: str, columns: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a rank records of a loss."""
    reads = block.cohorts[0].abilities[stage].reads
    losses = SampleLosses(block, stage, {name: columns[name] for name in columns if name in reads})
    every = torch.arange(len(block.packed.lengths))
    reduction = block.settings.loss.batch_reduction
    scalars = {}
    for name in losses.means:
        meant = Output(stage, name, 0.0, scope="rank", reduction=reduction)
        denominators = losses.aggregates.of(name)
        by_batch = denominators.by_batch(meant)
        total = losses.totals(every, by_batch=by_batch)[name]
        one = Recorded(meant, block.cohorts[0].owners[0], every, complete=True)
        scalars[name] = total / denominators.divisor(meant, every) + losses.apart(one)
    return {"scope": "rank", "reduction": reduction, "scale": 1.0, **scalars}


def _capture(
    path: Path,
    index: int,
    way: Way,
    step: Step,
    columns: Mapping[str, Tensor],
    scalars: Mapping[str, Mapping[str, Any]],
) -> None:
    draw = np.random.default_rng(index)
    raw = columns.get("raw_reward", torch.as_tensor(step.raw_reward)).tolist()
    rewards = columns.get("reward", torch.as_tensor(step.reward)).tolist()
    with Lake.open(path).capture(
        run_id="bench",
        rollout_id=index,
        step_id=0,
        rank=0,
        expected_ranks=[0],
        settings=way.settings,
        producer=PRODUCER,
        stages=way.stages,
    ) as capture:
        pairs = enumerate(zip(raw, rewards, strict=True))
        capture.samples([_sample(step, way, row, *pair) for row, pair in pairs])
        token_columns: dict[str, Any] = dict(step.token_columns())
        token_columns |= {name: _COLUMNS[name](step, draw) for name in way.columns}
        token_columns |= {"returns": step.advantages.reshape(-1)}
        token_columns |= {name: one for name, one in columns.items() if name not in _OF_SAMPLES}
        for name, values in token_columns.items():
            dtype = np.uint8 if name == "message_faults" else np.float32
            tensor = torch.as_tensor(np.asarray(values, dtype)).reshape(-1)
            source = "trainer" if name == "log_probs" else None
            version = None if source is None else WEIGHTS
            capture.tensor(name, tensor, source=source, weight_version=version)
        for stage, found in scalars.items():
            capture.expected(stage, **found)


def _sample(step: Step, way: Way, row: int, raw: float, reward: float) -> SampleRecord:
    """A sample of the workload, and all that some setting asks of one."""
    length, part = step.response_length, float(step.raw_reward[row])
    cut, fragments = length // 2, row // 2
    return SampleRecord(
        sample_id=f"s-{row}",
        group_index=int(step.group_index[row]),
        response_length=length,
        total_length=int(step.prompt_length[row]) + length,
        loss_mask=step.loss_mask[row].tolist(),
        raw_reward=raw,
        reward=reward,
        reward_components=dict.fromkeys(_PARTS, part) if way.settings.reward.weights else None,
        greedy_reward=0.5,
        kept_baseline=0.4,
        last_value=0.1,
        truncated=row % 5 == 0,
        turns=1 + row % 3,
        trajectory_id=f"t-{fragments}",
        fragment_index=row % 2,
        agent_id=("proposer", "solver")[row % 2],
        episode_id=f"e-{fragments}",
        weight_versions=[(0, cut, WEIGHTS - 2), (cut, length, WEIGHTS - 1)],
        micro_batch_id=f"mb-{row // MICRO_BATCH:04d}",
        consumer_batch_id=f"cb-{row // SAMPLES_PER_PROMPT}",
        first_message_length=cut,
    )


if __name__ == "__main__":
    main()

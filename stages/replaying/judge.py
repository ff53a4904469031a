"""The replay: selected cohorts and their closure, loaded in batches, judged stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from trajreplay.query.manifest.capture_sets import CaptureSets
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.contracts import STAGE_NAMES
from trajreplay.schema.errors import TrajReplayError
from trajreplay.schema.policy import Comparison
from trajreplay.schema.store import Store
from trajreplay.stages.advantages.estimate import replay_advantage_estimate
from trajreplay.stages.advantages.kl import replay_advantage_kl
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.sources import Sources
from trajreplay.stages.contract_checks import check_contracts, check_routes
from trajreplay.stages.losses.scalars import replay_loss_policy, replay_loss_value
from trajreplay.stages.plugins import Plugin
from trajreplay.stages.replaying.loading import Task, load_cohort
from trajreplay.stages.replaying.recipe import Recipes
from trajreplay.stages.report import CohortReport, Finding, StageResult
from trajreplay.stages.rewards.post_process import replay_reward_post_process
from trajreplay.stages.rewards.raw import replay_reward_raw
from trajreplay.stages.rewards.scoring import score_cohort
from trajreplay.stages.sample.samples import judge_samples

_STAGES: dict[str, Callable[[Block], None]] = {
    "reward.raw": replay_reward_raw,
    "reward.post_process": replay_reward_post_process,
    "advantage.kl": replay_advantage_kl,
    "advantage.estimate": replay_advantage_estimate,
    "loss.policy": replay_loss_policy,
    "loss.value": replay_loss_value,
}
# Tokens that are packed at once: what float64 work on them needs stays in the cache.
BLOCK_TOKENS = 1 << 18
BATCH_TOKENS = 1 << 18
# Samples in memory: eight columns of float32 as read, those of a block in float64, temporaries.
BYTES_PER_TOKEN = 512
DEFAULT_MEMORY_BYTES = 2 << 30


def replay_tasks(
    store: Store,
    sets: CaptureSets,
    tasks: Iterable[Task],
    *,
    stages: tuple[str, ...] = (),
    reward: Plugin | None = None,
    comparison: Comparison | None = None,
    allow_partial: bool = False,
    memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[CohortReport]:
    """Load and judge capture sets, rollouts before the steps that consumed them.

    Args:
        store: The lake.
        sets: All visible capture sets, where source rollouts are looked up.
        tasks: What to replay.
        stages: Stages asked for; all declared ones if empty.
        reward: A reward function that recomputes the raw rewards.
        comparison: How to compare; as the policy has it if None.
        allow_partial: Whether incomplete capture sets are replayed as far as they go.
        memory_bytes: What samples in memory may take.
        progress: Called with the capture sets done and all of them.

    Returns:
        One report per task, in report order.
    """
    ordered = sorted(tasks, key=lambda task: task.turn)
    sources, recipes = Sources(sets, memory_bytes // 4), Recipes(stages, reward)
    budget = min(BATCH_TOKENS, memory_bytes // BYTES_PER_TOKEN)
    reports: list[CohortReport] = []

    def load(task: Task) -> LoadedCohort | CohortReport:
        one = load_cohort(
            store,
            task,
            sources,
            recipes,
            allow_partial=allow_partial,
            memory_bytes=memory_bytes,
        )
        if not isinstance(one, LoadedCohort):
            return one
        one.comparison = comparison or one.comparison
        if reward is not None:
            score_cohort(one, reward)
        return check_routes(store, one)

    with one_thread():
        for batch in _batches(ordered, budget):
            for kind in ("rollout", "step"):
                found = [load(task) for task in batch if task.captures.kind == kind]
                judge_cohorts([one for one in found if isinstance(one, LoadedCohort)], sources)
                reports += [one.report if isinstance(one, LoadedCohort) else one for one in found]
            if progress is not None:
                progress(len(reports), len(ordered))
    for report in reports:
        finish_report(report)
    return sorted(reports, key=lambda report: report.place)


@contextmanager
def one_thread() -> Iterator[None]:
    """Blocks are small, and threads that share one mostly wait for each other."""
    # A large block given back once makes the allocator keep its temporaries: without it most of
    # the time goes into page faults.
    torch.empty(31 << 20, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _batches(tasks: list[Task], budget: int) -> Iterator[list[Task]]:
    batch: list[Task] = []
    tokens = 0
    for task in tasks:
        if batch and tokens + task.tokens > budget:
            yield batch
            batch, tokens = [], 0
        batch.append(task)
        tokens += task.tokens
    if batch:
        yield batch


def judge_cohorts(cohorts: list[LoadedCohort], sources: Sources) -> None:
    """Run all stages of cohorts that are in memory, those of one plan packed together.

    Args:
        cohorts: Rollouts or steps; their reports get what is found.
        sources: The rollouts that steps consumed from.
    """
    ready = []
    for cohort in cohorts:
        if not cohort.table.num_rows:
            cohort.report.stages += [
                StageResult(stage, "skipped", message="the cohort has no samples")
                for stage in cohort.stages
            ]
            continue
        if "sample" in cohort.stages:
            judge_samples(cohort, sources)
        cohort.drop_incomplete()
        ready.append(cohort)
    for block in _blocks(ready):
        if "sample" in block.stages:
            for cohort, found in zip(block.cohorts, check_contracts(block), strict=True):
                cohort.report.findings += found
        _run(block, sources)
    for cohort in ready:
        for result in cohort.report.stages:
            contract = cohort.owners[0].contracts.get(result.stage)
            result.version = contract.version if contract else result.version


def _run(block: Block, sources: Sources) -> None:
    """Run the stages of a block; what a kernel refuses is refused of its cohort's stage alone."""
    before = [(len(one.report.stages), len(one.report.findings)) for one in block.cohorts]
    try:
        for stage in [one for one in block.stages if one in _STAGES]:
            if len(block.cohorts) > 1:
                _STAGES[stage](block)
            else:
                _run_alone(block, stage)
    except TrajReplayError:  # of some cohort: each again by itself
        for cohort, (stages, findings) in zip(block.cohorts, before, strict=True):
            del cohort.report.stages[stages:], cohort.report.findings[findings:]
            _run(Block([cohort]), sources)
        return
    _remember(block, sources)


def _run_alone(block: Block, stage: str) -> None:
    """Run a stage of one cohort; where that fails, the stage is refused and the others go on."""
    (cohort,), kernel = block.cohorts, block.kernel(stage)
    report = cohort.report
    findings, results = list(report.findings), list(report.stages)
    try:
        _STAGES[stage](block)
        if kernel is not None:
            message = f"recomputed by the {kernel.what}"
            report.findings.append(Finding("kernel", "info", message, stage=stage))
    except TrajReplayError as error:
        result = StageResult(stage, "refused", message=error.message)
        report.findings, report.stages = findings, [*results, result]
        block.stages = [one for one in block.stages if one != stage]


def _blocks(cohorts: list[LoadedCohort]) -> Iterator[Block]:
    """Cohorts of one plan together, as many as fit a block."""
    by_plan: dict[tuple[object, ...], list[LoadedCohort]] = {}
    for cohort in cohorts:
        by_plan.setdefault(cohort.plan, []).append(cohort)
    for same in by_plan.values():
        if any(one.kernel is not None for one in same[0].abilities.values()):
            yield from (Block([one]) for one in same)  # such a kernel gets one cohort at a time
            continue
        block: list[LoadedCohort] = []
        tokens = 0
        for cohort in same:
            count = int(np.sum(cohort.table["response_length"].to_numpy()))
            if block and tokens + count > BLOCK_TOKENS:
                yield Block(block)
                block, tokens = [], 0
            block.append(cohort)
            tokens += count
        if block:
            yield Block(block)


def _remember(block: Block, sources: Sources) -> None:
    """Keep what a rollout's stages recomputed differently, for the steps that consumed it."""
    for name, values in block.chained.items():
        recorded = block.column(name)
        bounds = block.bounds_of(name)
        differs = recorded != values
        for index, cohort in enumerate(block.cohorts):
            start, stop = bounds[index], bounds[index + 1]
            if cohort.report.step_id is not None or not bool(differs[start:stop].any()):
                continue
            where = differs[start:stop].nonzero().squeeze(1) + start
            rows: dict[str, torch.Tensor] = {}
            if block.per_token(name):
                offsets = block.packed.offsets
                owners = torch.searchsorted(offsets, where, right=True) - 1
                for sample in sorted(set(owners.tolist())):
                    span = slice(int(offsets[sample]), int(offsets[sample + 1]))
                    rows[str(block.packed.text("sample_id", sample))] = values[span].clone()
            else:
                for sample in where.tolist():
                    rows[str(block.packed.text("sample_id", sample))] = values[sample]
            report = cohort.report
            place = Cohort(report.run_id, report.attempt, report.rollout_id, None)
            sources.remember(place, name, rows)


def finish_report(report: CohortReport) -> None:
    """Put stages in order, and let findings of severity error make their stage diverge."""
    for finding in report.findings:
        if finding.severity != "error" or finding.stage is None:
            continue
        result = next((one for one in report.stages if one.stage == finding.stage), None)
        if result is None or result.verdict == "not-declared":
            result = StageResult(finding.stage, "diverged", message=finding.message)
            report.stages = [one for one in report.stages if one.stage != finding.stage]
            report.stages.append(result)
        elif result.verdict != "diverged":
            result.verdict = "diverged"
            result.message = result.message or finding.message
    report.stages.sort(key=lambda one: STAGE_NAMES.index(one.stage))

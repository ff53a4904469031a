"""Samples of the test trainer, written to a lake through the public capture API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tests.helpers.trainer import METRICS, Arithmetic, Sample, Trainer
from trajreplay import Lake, ParallelCoordinates, ProducerInfo, SampleRecord
from trajreplay.schema import Entry

ROLLOUT_STAGES = (
    "sample",
    "reward.raw",
    "reward.post_process",
    "advantage.kl",
    "advantage.estimate",
)
STEP_STAGES = ("sample", "loss.policy")
ALL_STAGES = (*ROLLOUT_STAGES, "loss.policy")
ROLLOUT_COLUMNS = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "kl",
    "advantages",
    "returns",
)
STEP_COLUMNS = ("rollout_log_probs", "old_log_probs", "log_probs", "entropy", "advantages")
ALL_COLUMNS = (*ROLLOUT_COLUMNS, "log_probs", "entropy")

Shares = Mapping[int, Sequence[Sample]]


@dataclass
class Expected:
    """Scalars of one call of `expected`: the values, and what they are said to be."""

    values: Mapping[str, Any]
    meaning: dict[str, Any] = field(default_factory=dict)
    stage: str = "loss.policy"


def capture(
    lake: Lake,
    shares: Shares,
    arithmetic: Arithmetic,
    *,
    rollout_id: int = 0,
    step_id: int | None = None,
    stages: Sequence[Any] = ALL_STAGES,
    columns: Sequence[str] = ALL_COLUMNS,
    expected: Mapping[int, Sequence[Expected]] | None = None,
    run_id: str = "r",
    ranks: Sequence[int] | None = None,
    reward_dtype: str = "float32",
    parallel: Mapping[int, ParallelCoordinates] | None = None,
    settings: Any = None,
    without: Sequence[str] = (),
    versions: Mapping[str, int] = MappingProxyType({}),
    **options: Any,
) -> list[Entry]:
    """Write one cohort, a capture for each rank that has a share of it.

    Args:
        lake: Where to.
        shares: The samples of each rank, in row order.
        arithmetic: What the settings say.
        rollout_id: The rollout.
        step_id: The step within it; None for the rollout itself.
        stages: Declared stages.
        columns: Token columns to record, as far as the samples hold them.
        expected: Recorded scalars of each rank.
        run_id: The run.
        ranks: Expected ranks, if not those of `shares`.
        reward_dtype: dtype in which the rewards were computed.
        parallel: Coordinates of ranks; by default each is a data-parallel rank.
        settings: Settings to record, if not the short form of `arithmetic`.
        without: Fields of the sample records to leave out.
        versions: Weights that token columns were computed with.
        options: Passed on to `Lake.capture`.

    Returns:
        The committed entries, in the order of `shares`.
    """
    expected_ranks = list(ranks or shares)
    size = max(expected_ranks) + 1
    entries = []
    for rank, samples in shares.items():
        place = ParallelCoordinates(data_rank=rank, data_size=size)
        with lake.capture(
            run_id=run_id,
            rollout_id=rollout_id,
            step_id=step_id,
            rank=rank,
            expected_ranks=expected_ranks,
            settings=arithmetic.short if settings is None else settings,
            stages=stages,
            producer=ProducerInfo(commit="abc", torch_version="2"),
            parallel=place if parallel is None else parallel[rank],
            **options,
        ) as builder:
            records = [record(one, without, step=step_id is not None) for one in samples]
            builder.samples(records, reward_dtype=reward_dtype)
            for name in columns:
                held = [one.columns.get(name) for one in samples]
                if any(one is not None for one in held):
                    version = versions.get(name)
                    source = None if version is None else "trainer"
                    builder.tensor(name, held, source=source, weight_version=version)
            for one in (expected or {}).get(rank, ()):
                builder.expected(one.stage, **one.values, **one.meaning)
        assert builder.entry is not None
        entries.append(builder.entry)
    return entries


def record(sample: Sample, without: Sequence[str] = (), *, step: bool = True) -> SampleRecord:
    """A sample as its record."""
    facts = {
        "group_id": sample.group,
        "group_size": sample.group_size,
        "raw_reward": sample.raw_reward,
        "reward": sample.reward,
        "micro_batch_id": sample.micro_batch_id,
        "context_rank": sample.context[0],
        "context_size": sample.context[1],
        "padded_length": sample.padded_length,
        "consumer_batch_id": sample.consumer_batch_id,
        "reward_components": sample.components,
        "greedy_reward": sample.greedy_reward,
        "trajectory_id": sample.trajectory_id,
        "fragment_index": sample.fragment_index,
        "agent_id": sample.agent_id,
        "episode_id": sample.episode_id,
        "turns": sample.turns,
        "first_message_length": sample.first_message_length,
        "kept_baseline": sample.kept_baseline,
        "last_value": sample.last_value,
        "truncated": sample.truncated,
        "weight_versions": sample.weight_versions,
        "source_rollout_id": sample.rollout_id if step else None,
        "source_attempt": sample.attempt if step else None,
    }
    return SampleRecord(
        sample_id=sample.sample_id,
        response_length=sample.length,
        total_length=sample.length + sample.prompt_length,
        loss_mask=sample.mask,
        **{name: value for name, value in facts.items() if name not in without},  # type: ignore[arg-type]
    )


def rank_sums(trainer: Trainer, shares: Shares) -> dict[int, list[Expected]]:
    """The loss of each rank as a sum over its samples."""
    meaning = {"scope": "rank", "reduction": "sum"}
    return {rank: [Expected(terms(trainer, samples), meaning)] for rank, samples in shares.items()}


def terms(trainer: Trainer, samples: Sequence[Sample], factor: float = 1.0) -> dict[str, float]:
    """The loss terms of some samples, times a factor, in METRICS' order."""
    found = trainer.loss(samples)
    return {name: found[name] * factor for name in METRICS if name in found}

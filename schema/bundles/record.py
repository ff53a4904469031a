"""What a file of another tool says of one rank's capture, in this project's own terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trajreplay.schema.contracts import StageContract
from trajreplay.schema.entry import LogProbOrigin
from trajreplay.schema.identity import ParallelCoordinates, ProducerInfo
from trajreplay.schema.policy import Tolerance
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.schema.records import SampleRecord, values_of
from trajreplay.schema.settings import Settings


@dataclass(frozen=True)
class Scalars:
    """Recorded results of one stage, with what they mean.

    Args:
        stage: The stage.
        fields: The numbers by name; at scope sample one for each sample.
        scope: sample, micro_batch, rank or global; None if unstated.
        reduction: sum, mean or weighted-mean; None if unstated.
        micro_batch_id: At scope micro_batch.
        denominator: What a weighted mean divides by, by field.
        scale: Factor already inside.
    """

    stage: str
    fields: Mapping[str, Any]
    scope: str | None = None
    reduction: str | None = None
    micro_batch_id: str | None = None
    denominator: Mapping[str, float] | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class CaptureRecord:
    """One rank's capture of a rollout or a step, as a reader of files hands it over.

    Args:
        run_id: The training job.
        rollout_id: Round of sampling.
        step_id: Optimizer step; None at rollout level.
        rank: The process.
        expected_ranks: Ranks of its capture set.
        settings: The arithmetic in force, in full or in the short form.
        samples: The samples in order.
        tensors: Columns of tokens by name: packed, or one array a sample and None where it has
            none.
        routes: Choices of experts by name, as a capture's `routes` takes them.
        scalars: Recorded results.
        stages: What is claimed of each stage.
        tolerances: The producer's own comparison, by stage.
        origins: Where columns of log-probs came from.
        producer: The program, and what else the files say that has no column.
        parallel: Where the rank stands.
        redaction: What may be kept of text.
        reward_dtype: dtype in which the trainer computed the rewards.
        notes: What the files hold and this record does not.
    """

    run_id: str
    rollout_id: int
    step_id: int | None
    settings: Settings | RecomputeConfig
    samples: Sequence[SampleRecord]
    rank: int = 0
    expected_ranks: tuple[int, ...] = (0,)
    tensors: Mapping[str, Any] = field(default_factory=dict)
    routes: Mapping[str, Any] = field(default_factory=dict)
    scalars: tuple[Scalars, ...] = ()
    stages: tuple[StageContract, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    origins: Mapping[str, LogProbOrigin] = field(default_factory=dict)
    producer: ProducerInfo = field(default_factory=ProducerInfo)
    parallel: ParallelCoordinates = field(default_factory=ParallelCoordinates)
    redaction: Mapping[str, str] = field(default_factory=dict)
    reward_dtype: str = "float32"
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(values_of(self.samples, "response_length"))


@dataclass(frozen=True)
class EventLine:
    """One event as a file has it.

    Args:
        event: What happened.
        detail: A JSON object with what else is known.
        sample_id: The sample concerned.
        time_us: When, microseconds since 1970.
    """

    event: str
    detail: str
    sample_id: str | None
    time_us: int


@dataclass(frozen=True)
class EventRecord:
    """The events of one rank, of no rollout in particular, as a reader of files hands them over.

    Args:
        run_id: The training job.
        events: At least one, in order.
        rank: The process.
        expected_ranks: Ranks of the job.
        producer: The program that wrote them.
        notes: What the files hold and this record does not.
    """

    run_id: str
    events: tuple[EventLine, ...]
    rank: int = 0
    expected_ranks: tuple[int, ...] = (0,)
    producer: ProducerInfo = field(default_factory=ProducerInfo)
    notes: tuple[str, ...] = ()

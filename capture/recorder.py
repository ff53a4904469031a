"""The recorder that a trainer calls; this one, of a training without capture, does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trajreplay.schema import RecomputeConfig, SampleRecord, Settings, StageContract


class Recorder:
    """What one process tells of its rollouts and steps; made by `capture.enable`.

    No method raises, waits for a disk, or keeps what it is given: tensors are copied when they
    are handed over, and whatever goes wrong is warned of once and noted in the lake, where the
    capture then is one that was dropped, with the reason. What has a default is given by name.

    Attributes:
        enabled: Whether anything is recorded. A recorder that is not costs a call and looks at
            no argument; `if recorder.enabled:` costs less than that.
        attempt: The attempt of the run.
    """

    # No parameter of a loss is for keywords alone, and none takes up names that are not told here:
    # the lookup of such defaults, and the dictionary, take longer than the rest of a call that does
    # nothing.
    enabled = False
    attempt = 0

    def describe_routes(
        self, num_experts: int | None = None, layer_numbers: Sequence[int] | None = None
    ) -> None:
        """Say what all choices of experts have in common that are recorded from here on.

        Args:
            num_experts: Experts of a layer.
            layer_numbers: The number of each recorded layer in the model, where it is not its
                place among them.
        """

    def begin_rollout(
        self,
        rollout_id: int,
        settings: Settings | RecomputeConfig | None = None,
        stages: Sequence[str | StageContract] | None = None,
        cohort_size: int | None = None,
    ) -> None:
        """Begin what this rank generated in a round of sampling.

        Args:
            rollout_id: The round, as the trainer counts; the same number on all ranks.
            settings: The arithmetic in force; that of `enable` if omitted.
            stages: Stages that can be recomputed from it; those of `enable` if omitted.
            cohort_size: Samples over all ranks, where known.
        """

    def record(
        self,
        samples: Sequence[SampleRecord],
        origins: Mapping[str, Mapping[str, Any]] | None = None,
        **columns: Any,
    ) -> None:
        """Record samples of the open rollout; several calls append.

        Args:
            samples: One record each.
            origins: By column of log-probs, its source, temperature and weight_version.
            columns: Values of any list column: one tensor per sample, packed, or padded to
                (samples, T). A `loss_mask` here is taken instead of those of the records. Under
                `rollout_experts`, `old_experts` and `experts` the experts that sampler or trainer
                chose: one (tokens, layers, top_k) array of integers per sample, as of a capture's
                `routes`.
        """

    def note(self, fate: str, sample_ids: Sequence[str], reason: str = "") -> None:
        """Note what became of samples of the open rollout, recorded ones and others.

        Args:
            fate: generated, scored, filtered, consumed, or buffered, for a later rollout.
            sample_ids: The samples.
            reason: Why, of filtered ones: a word such as zero-std, and no text.
        """

    def end_rollout(self) -> None:
        """End the open rollout and hand it over to be written."""

    def begin_step(
        self,
        rollout_id: int,
        step_id: int,
        settings: Settings | RecomputeConfig | None = None,
        stages: Sequence[str | StageContract] | None = None,
        cohort_size: int | None = None,
    ) -> None:
        """Begin an optimizer step.

        Args:
            rollout_id: The rollout during whose training it is taken.
            step_id: Its number within that rollout.
            settings: The arithmetic in force; that of `enable` if omitted.
            stages: Stages that can be recomputed from it; those of `enable` if omitted.
            cohort_size: Samples over all ranks, where known.
        """

    def record_policy_loss(
        self,
        micro_batch: int | None,
        samples: Sequence[SampleRecord],
        scalars: Mapping[str, Any] | None = None,
        log_probs: Any = None,
        old_log_probs: Any = None,
        advantages: Any = None,
        ref_log_probs: Any = None,
        reduction: str = "mean",
        scale: float = 1.0,
        denominator: float | None = None,
        origins: Mapping[str, Mapping[str, Any]] | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Record what the policy loss of one micro-batch consumed, and what it came to.

        Args:
            micro_batch: Its number within the step. A forward pass that is repeated, as activation
                checkpointing does, has the number it had, and is taken once.
            samples: One record per sample.
            scalars: `loss`, and others of the stage that the trainer computes: pg_loss,
                entropy_loss, pg_clipfrac, ppo_kl, kl_loss.
            log_probs: Values of this column, in a form that `record` takes.
            old_log_probs: Likewise.
            advantages: Likewise.
            ref_log_probs: Likewise.
            reduction: What they are over the micro-batch: mean or sum.
            scale: Factor inside them, such as 1 / accumulation steps.
            denominator: What a mean divides by, if not by what the micro-batch has.
            origins: By column of log-probs, its source, temperature and weight_version.
            columns: Values of any other list column, by its name, as of `record`.
        """

    def record_value_loss(
        self,
        micro_batch: int | None,
        samples: Sequence[SampleRecord],
        scalars: Mapping[str, Any] | None = None,
        values: Any = None,
        returns: Any = None,
        old_values: Any = None,
        reduction: str = "mean",
        scale: float = 1.0,
        denominator: float | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the value loss of a micro-batch; arguments as of `record_policy_loss`."""

    def record_scalars(
        self, stage: str, scalars: Mapping[str, Any], scope: str = "rank", **meaning: Any
    ) -> None:
        """Record scalars of the open step over the whole rank or cohort.

        Args:
            stage: The stage that computed them.
            scalars: Numbers by name.
            scope: rank or global.
            meaning: reduction, scale, numerator, denominator, as of a capture's `expected`.
        """

    def end_step(self, **scalars: Any) -> None:
        """End the open step and hand it over to be written.

        Args:
            scalars: What else is known of it now: `grad_norm`, and other fields of a heartbeat,
                such as `step`, the optimizer steps of the job so far. A trigger looks at any, and
                at each of several in a tuple. One that is on a device is not waited for.
        """

    def is_recording(self, level: str) -> bool:
        """Whether what is told of the open rollout or step is recorded, and not only its heartbeat.

        Args:
            level: rollout or step. An integration asks before it prepares what takes time.
        """
        return False

    def drop(self, reason: str) -> None:
        """Give up what is open; the lake says that it was, and why.

        Args:
            reason: Why: a word such as loss-spike. Of a text only its length is kept.
        """

    def promote(self, reason: str) -> None:
        """Write the last steps that are held, and the rollouts that they consumed from.

        Args:
            reason: Why: a word such as loss-spike, stored with each of them as the producer's
                `trigger`. Of a text only its length is kept.
        """

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until what was handed over is written.

        Args:
            timeout_s: How long at most; without end if omitted.

        Returns:
            Whether it is.
        """
        return True

    def close(self, timeout_s: float | None = None) -> bool:
        """End recording, and note that the training ended as it should.

        The end of the program writes what waits too, and leaves that note out.

        Args:
            timeout_s: How long to write; what is left then is noted as dropped.

        Returns:
            Whether the lake holds everything, as data or as dropped.
        """
        return True

    def retire(self) -> None:
        """End recording because another recorder takes its place; notes no clean end."""

    def guard(self, where: str) -> AbstractContextManager[None]:
        """A block of an integration: an exception in it is warned of and drops what is open.

        Args:
            where: What the block does, for the warning, and where it is a word for the reason.
        """
        return _NOTHING

    def rollout(self, rollout_id: int, **options: Any) -> AbstractContextManager[None]:
        """`begin_rollout` and `end_rollout` around a block; an exception drops the capture."""
        return _NOTHING

    def step(self, rollout_id: int, step_id: int, **options: Any) -> AbstractContextManager[None]:
        """`begin_step` and `end_step` around a block; an exception drops the capture."""
        return _NOTHING


_NOTHING: AbstractContextManager[None] = nullcontext()

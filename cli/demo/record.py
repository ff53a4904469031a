"""Recording: all that the demo training tells the lake, through the public capture API only."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import trajreplay
from trajreplay import Lake, ParallelCoordinates, ProducerInfo, RecomputeConfig, SampleRecord
from trajreplay.cli.demo.config import RUN_ID, TrainingConfig
from trajreplay.cli.demo.grpo import LossInputs, LossTerms, total_loss
from trajreplay.cli.demo.sampler import Sample
from trajreplay.writer import CaptureBuilder

ROLLOUT_STAGES = (
    "sample",
    "reward.raw",
    "reward.post_process",
    "advantage.kl",
    "advantage.estimate",
)
STEP_STAGES = ("sample", "loss.policy")


@dataclass
class MicroBatch:
    """Samples that went through one forward and backward pass, and the loss of them."""

    samples: Sequence[Sample]
    inputs: Sequence[LossInputs]
    losses: LossTerms


class Recorder:
    """One rank's pen: a capture for each rollout, and one for each optimizer step."""

    def __init__(self, lake_path: Path, rank: int, config: TrainingConfig) -> None:
        self._lake = Lake.open(lake_path)
        self._rank = rank
        self._group_size = config.samples_per_prompt
        self._rollout_size = config.prompts_per_rollout * config.samples_per_prompt
        self._temperature = config.temperature
        self._ranks = list(range(config.ranks))
        self._parallel = ParallelCoordinates(data_rank=rank, data_size=config.ranks)
        self._producer = ProducerInfo(
            commit=f"trajreplay-{trajreplay.__version__}",
            torch_version=str(torch.__version__),
            framework="trajreplay demo",
        )
        self._settings = RecomputeConfig(
            advantage_estimator="grpo",
            n_samples_per_prompt=config.samples_per_prompt,
            grpo_std_normalization=True,
            kl_loss_type="k3",
            kl_coef=config.kl_coef,
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip_high,
            entropy_coef=config.entropy_coef,
            use_kl_loss=False,
            use_tis=False,
            use_opsm=False,
            use_opd=False,
            calculate_per_token_loss=False,
            partial_rollout=True,
        )

    def record_rollout(
        self, rollout_id: int, samples: Sequence[Sample], *, weight_version: int
    ) -> None:
        """Commit what this rank sampled in a rollout, and what was made of it before any step.

        Args:
            rollout_id: The rollout.
            samples: This rank's samples, evaluated.
            weight_version: Version of the actor that computed their old log-probs.
        """
        with self._capture(ROLLOUT_STAGES, rollout_id, cohort_size=self._rollout_size) as capture:
            capture.samples([self._describe(sample, sample.loss_mask) for sample in samples])
            capture.tensor("tokens", [sample.tokens for sample in samples])
            capture.tensor(
                "rollout_log_probs",
                [torch.tensor(sample.rollout_log_probs) for sample in samples],
                source="sampler",
                temperature=self._temperature,
            )
            capture.tensor(
                "old_log_probs",
                [sample.old_log_probs for sample in samples],
                source="trainer",
                temperature=self._temperature,
                weight_version=weight_version,
            )
            capture.tensor("ref_log_probs", [sample.ref_log_probs for sample in samples])
            capture.tensor("kl", [sample.kl for sample in samples])
            capture.tensor("advantages", [sample.advantages for sample in samples])

    def record_step(
        self,
        rollout_id: int,
        step_id: int,
        micro_batches: Sequence[MicroBatch],
        *,
        batch_size: int,
        weight_version: int,
    ) -> None:
        """Commit what this rank's share of an optimizer step consumed, and its loss.

        Args:
            rollout_id: The rollout during whose training the step was taken.
            step_id: Its number within the rollout.
            micro_batches: This rank's share of the step.
            batch_size: Samples of the whole step, over all ranks.
            weight_version: Version of the actor before the step.
        """
        rows = [
            (sample, inputs, _micro_batch_id(index))
            for index, batch in enumerate(micro_batches)
            for sample, inputs in zip(batch.samples, batch.inputs, strict=True)
        ]
        with self._capture(STEP_STAGES, rollout_id, step_id, cohort_size=batch_size) as capture:
            capture.samples(
                [
                    self._describe(sample, inputs.loss_mask.tolist(), micro_batch_id)
                    for sample, inputs, micro_batch_id in rows
                ]
            )
            capture.tensor(
                "log_probs",
                [inputs.log_probs.detach() for _, inputs, _ in rows],
                source="trainer",
                temperature=self._temperature,
                weight_version=weight_version,
            )
            capture.tensor("old_log_probs", [inputs.old_log_probs for _, inputs, _ in rows])
            capture.tensor("entropy", [inputs.entropy.detach() for _, inputs, _ in rows])
            capture.tensor("advantages", [inputs.advantages for _, inputs, _ in rows])

            losses = total_loss([batch.losses for batch in micro_batches])
            _expect(capture, losses, batch_size, "rank")
            for index, batch in enumerate(micro_batches):
                _expect(capture, batch.losses, batch_size, "micro_batch", _micro_batch_id(index))

    def _capture(
        self,
        stages: Sequence[str],
        rollout_id: int,
        step_id: int | None = None,
        *,
        cohort_size: int,
    ) -> CaptureBuilder:
        return self._lake.capture(
            run_id=RUN_ID,
            rollout_id=rollout_id,
            step_id=step_id,
            rank=self._rank,
            expected_ranks=self._ranks,
            cohort_size=cohort_size,
            settings=self._settings,
            producer=self._producer,
            parallel=self._parallel,
            stages=stages,
            redaction={"prompt": "truncate:64"},
        )

    def _describe(
        self, sample: Sample, loss_mask: Sequence[int], micro_batch_id: str | None = None
    ) -> SampleRecord:
        request = sample.request
        return SampleRecord(
            sample_id=request.sample_id,
            group_index=request.group_index,
            group_size=self._group_size,
            response_length=sample.response_length,
            total_length=sample.total_length,
            loss_mask=loss_mask,
            raw_reward=sample.raw_reward,
            reward=sample.reward,
            source_rollout_id=request.rollout_id,
            rollout_partition_id=f"part-{request.partition_index:02d}",
            consumer_batch_id=f"batch-{sample.consumer_batch_index:04d}",
            micro_batch_id=micro_batch_id,
            weight_versions=sample.weight_versions,
            truncated=sample.truncated,
            prompt=request.prompt.text,
        )


def _expect(
    capture: CaptureBuilder,
    losses: LossTerms,
    batch_size: int,
    scope: str,
    micro_batch_id: str | None = None,
) -> None:
    """Say what the trainer's losses came to, and what these numbers are.

    Each is a sum over samples divided by the number of samples of the whole step, so that adding
    it up over micro-batches and ranks gives the mean of the step.
    """
    capture.expected(
        "loss.policy",
        loss=losses.loss.item(),
        pg_loss=losses.pg_loss.item(),
        entropy_loss=losses.entropy_loss.item(),
        pg_clipfrac=losses.pg_clipfrac.item(),
        ppo_kl=losses.ppo_kl.item(),
        scope=scope,
        reduction="mean",
        denominator=batch_size,
        micro_batch_id=micro_batch_id,
    )


def _micro_batch_id(index: int) -> str:
    return f"mb-{index:04d}"

"""One rank of the demo training: an asynchronous GRPO loop in plain torch.

Read `Trainer.train` first. The lines that call `self._recorder` are all that recording adds.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trajreplay.cli.demo.config import TrainingConfig
from trajreplay.cli.demo.grpo import (
    LossInputs,
    LossTerms,
    k3_divergence,
    masked_mean,
    normalize_rewards,
    sample_loss,
    total_loss,
)
from trajreplay.cli.demo.policy import Policy, response_statistics
from trajreplay.cli.demo.record import MicroBatch, Recorder
from trajreplay.cli.demo.sampler import Sample, Sampler
from trajreplay.cli.demo.schedule import (
    Arrival,
    ConsumerStream,
    pack_micro_batches,
    plan_requests,
    stream_order,
)


@dataclass(frozen=True)
class RolloutReport:
    """What a rank knows of a rollout when its steps are taken."""

    rollout_id: int
    steps: int
    mean_raw_reward: float
    mean_kl: float
    max_staleness: int


class Trainer:
    """The actor, its optimizer, its sampler and the frozen reference, as one rank holds them."""

    def __init__(self, rank: int, config: TrainingConfig, recorder: Recorder) -> None:
        torch.manual_seed(config.seed)  # every rank begins with the same weights
        self._rank = rank
        self._config = config
        self._recorder = recorder
        self._actor = Policy()
        self._reference = copy.deepcopy(self._actor)
        # The actor as it was a rollout ago, for stale-old-log-probs to mistake for the current one.
        self._earlier_actor = copy.deepcopy(self._actor)
        for parameter in self._actor.parameters():
            # There from the start: a rank without samples takes part in the first sum as well.
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.Adam(self._actor.parameters(), lr=config.learning_rate)
        self._version = 0
        self._sampler = Sampler(
            self._actor,
            temperature=config.temperature,
            seed=config.seed * config.ranks + rank,
        )
        self._stream = ConsumerStream(config.consumer_batch_size)
        self._waiting: dict[str, Sample] = {}

    def train(self) -> Iterator[RolloutReport]:
        """Run all rollouts, each sampled while the actor still learns from the one before."""
        self._start_sampling(0)
        for rollout_id in range(self._config.rollouts):
            samples = self._sampler.finish()
            if rollout_id + 1 < self._config.rollouts:
                self._start_sampling(rollout_id + 1)
            yield self._learn(rollout_id, samples)

    def _learn(self, rollout_id: int, samples: Sequence[Sample]) -> RolloutReport:
        """Take the optimizer steps for which the samples of a rollout suffice."""
        arrivals = self._receive(samples, rollout_id)
        self._evaluate(samples, rollout_id)
        self._recorder.record_rollout(rollout_id, samples, weight_version=self._version)

        actor_before = copy.deepcopy(self._actor)
        steps, staleness = 0, 0
        for step_id, members in enumerate(self._stream.full_batches()):
            mine = [self._waiting.pop(name) for name in members if name in self._waiting]
            staleness = max(staleness, self._staleness(mine))
            self._take_step(rollout_id, step_id, mine, batch_size=len(members))
            self._sampler.advance(self._config.tokens_per_step)
            steps += 1
        self._earlier_actor = actor_before
        return RolloutReport(
            rollout_id=rollout_id,
            steps=steps,
            mean_raw_reward=sum(arrival.raw_reward for arrival in arrivals) / len(arrivals),
            mean_kl=_mean_kl(samples),
            max_staleness=staleness,
        )

    def _start_sampling(self, rollout_id: int) -> None:
        requests = plan_requests(self._config, rollout_id)
        self._sampler.start([request for request in requests if request.rank == self._rank])

    def _receive(self, samples: Sequence[Sample], rollout_id: int) -> list[Arrival]:
        """Score the rollout together with the other ranks and queue it for training."""
        arrivals = stream_order(
            _gather(
                [
                    Arrival(
                        sample.request.sample_id,
                        sample.request.group_index,
                        sample.response_length,
                        sample.raw_reward,
                    )
                    for sample in samples
                ]
            )
        )
        consumer_batches = self._stream.append([arrival.sample_id for arrival in arrivals])
        cohorts = [arrival.group_index for arrival in arrivals]
        if self._has_fault("physical-batch", rollout_id):
            cohorts = consumer_batches
        rewards = normalize_rewards([arrival.raw_reward for arrival in arrivals], cohorts)

        self._waiting |= {sample.request.sample_id: sample for sample in samples}
        for arrival, batch_index, reward in zip(arrivals, consumer_batches, rewards, strict=True):
            if arrival.sample_id in self._waiting:
                sample = self._waiting[arrival.sample_id]
                sample.consumer_batch_index = batch_index
                sample.reward = reward
        return arrivals

    @torch.no_grad()
    def _evaluate(self, samples: Sequence[Sample], rollout_id: int) -> None:
        """Compute what the steps need of each sample before any of them changes the weights."""
        old_log_probs, _ = self._statistics(self._actor, samples)
        ref_log_probs, _ = self._statistics(self._reference, samples)
        for sample, old, ref in zip(samples, old_log_probs, ref_log_probs, strict=True):
            log_ratio = ref - old
            if self._has_fault("kl-sign", rollout_id):
                log_ratio = old - ref
            sample.old_log_probs = old
            sample.ref_log_probs = ref
            sample.kl = k3_divergence(log_ratio)
            sample.advantages = torch.full((sample.response_length,), sample.reward)

    def _take_step(
        self, rollout_id: int, step_id: int, samples: Sequence[Sample], batch_size: int
    ) -> None:
        """Take one optimizer step on a consumer batch of which this rank holds `samples`."""
        denominator = batch_size
        if self._has_fault("loss-denominator", rollout_id):
            denominator = len(samples)

        self._optimizer.zero_grad(set_to_none=False)
        micro_batches = []
        for members in pack_micro_batches(samples, self._config.micro_batch_tokens):
            inputs = self._consume(members, rollout_id)
            losses = total_loss([self._sample_loss(sample) for sample in inputs], denominator)
            torch.autograd.backward(losses.loss)
            micro_batches.append(MicroBatch(members, inputs, losses))
        self._recorder.record_step(
            rollout_id,
            step_id,
            micro_batches,
            batch_size=batch_size,
            weight_version=self._version,
        )

        # Each rank's loss is already divided by the samples of all ranks: gradients just add up.
        _add_gradients_over_ranks(self._actor)
        nn.utils.clip_grad_norm_(self._actor.parameters(), self._config.max_gradient_norm)
        self._optimizer.step()
        self._version += 1
        if self._version % self._config.publish_interval == 0:
            self._sampler.load_weights(self._actor, self._version)

    def _consume(self, samples: Sequence[Sample], rollout_id: int) -> list[LossInputs]:
        """Run the actor on a micro-batch and lay out what its loss is computed from."""
        log_probs, entropy = self._statistics(self._actor, samples)
        old_log_probs = [sample.old_log_probs for sample in samples]
        if self._has_fault("stale-old-log-probs", rollout_id):
            with torch.no_grad():
                old_log_probs, _ = self._statistics(self._earlier_actor, samples)
        loss_masks = [torch.tensor(sample.loss_mask) for sample in samples]
        if self._has_fault("mask-shift", rollout_id):
            loss_masks = [mask.roll(1) for mask in loss_masks]
        advantages = [sample.advantages for sample in samples]
        columns = zip(log_probs, old_log_probs, entropy, advantages, loss_masks, strict=True)
        return [LossInputs(*values) for values in columns]

    def _sample_loss(self, inputs: LossInputs) -> LossTerms:
        return sample_loss(
            inputs,
            eps_clip=self._config.eps_clip,
            eps_clip_high=self._config.eps_clip_high,
            entropy_coef=self._config.entropy_coef,
        )

    def _statistics(
        self, policy: Policy, samples: Sequence[Sample]
    ) -> tuple[list[Tensor], list[Tensor]]:
        return response_statistics(
            policy,
            [sample.tokens for sample in samples],
            [sample.response_length for sample in samples],
            temperature=self._config.temperature,
        )

    def _staleness(self, samples: Sequence[Sample]) -> int:
        """Count the versions between the oldest weights that wrote a token and the actor's."""
        oldest = (min(sample.token_versions) for sample in samples)
        return self._version - min(oldest, default=self._version)

    def _has_fault(self, name: str, rollout_id: int) -> bool:
        return self._config.fault == name and rollout_id >= self._config.first_faulty_rollout


def _gather(mine: Sequence[Arrival]) -> list[Arrival]:
    """Bring the arrivals of all ranks together, the same list on each."""
    shares: list[Sequence[Arrival]] = [()] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    return [arrival for share in shares for arrival in share]


def _mean_kl(samples: Sequence[Sample]) -> float:
    """Average the KL over the tokens that the policy wrote itself."""
    kl = torch.cat([sample.kl for sample in samples])
    loss_mask = torch.cat([torch.tensor(sample.loss_mask) for sample in samples])
    return float(masked_mean(kl, loss_mask))


def _add_gradients_over_ranks(policy: Policy) -> None:
    """Replace every gradient by its sum over the ranks, in one message."""
    gradients = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, parts, strict=True):
        gradient.copy_(total.view_as(gradient))

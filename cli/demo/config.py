"""The sizes and coefficients of the demo training, in one place."""

from dataclasses import dataclass

RUN_ID = "demo"


@dataclass(frozen=True)
class TrainingConfig:
    """What every rank of the demo training is told.

    The sizes are odd on purpose: twenty-two samples a step neither divide the 84 of a rollout nor
    hold a whole number of groups of six, so that steps straddle rollouts and cut through groups.
    """

    rollouts: int = 24
    seed: int = 0
    fault: str = "none"

    ranks: int = 2
    prompts_per_rollout: int = 14
    samples_per_prompt: int = 6
    partition_size: int = 8
    """Requests handed to one sampler at a time, in prompt order; the unit that goes to a rank."""
    consumer_batch_size: int = 22
    """Samples of one optimizer step, over all ranks."""
    micro_batch_tokens: int = 64
    """Prompt and response tokens that one forward and backward pass may hold."""

    tokens_per_step: int = 3
    """Tokens that the samplers add to every open response while the actor takes one step."""
    publish_interval: int = 2
    """Optimizer steps between two hand-overs of the actor's weights to the samplers."""

    temperature: float = 1.0
    learning_rate: float = 0.015
    max_gradient_norm: float = 1.0
    eps_clip: float = 0.2
    eps_clip_high: float = 0.28
    entropy_coef: float = 0.003
    kl_coef: float = 0.05
    """Only switches the recording of the KL on: GRPO's advantages do not subtract it."""

    @property
    def first_faulty_rollout(self) -> int:
        """The rollout from which on the fault acts; the ones before it are healthy."""
        return self.rollouts // 3

"""One generation of TRL: its samples as records, found again by a row number that rides along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trajreplay.schema.records import SampleRecord

if TYPE_CHECKING:
    import torch

ROW = "trajreplay_row"  # the key under which TRL shuffles and splits it with the tensors
_ROLLOUT_BITS = 32


@dataclass
class Scored:
    """What the reward functions were given, and what they gave.

    Args:
        rewards: (N, F) float32. Rewards of the samples of all ranks; NaN where there is none.
        prompts, completions: Those of this rank, as TRL holds them.
        lengths: Tokens of each response of this rank; None where TRL does not say.
    """

    rewards: torch.Tensor
    prompts: Sequence[Any] = ()
    completions: Sequence[Any] = ()
    lengths: Sequence[int] | None = None


@dataclass(frozen=True)
class Generation:
    """The samples that this rank generated in one round.

    Args:
        rollout_id: The round.
        records: The samples in row order.
        first: The number of the first of them among those of all ranks.
    """

    rollout_id: int
    records: tuple[SampleRecord, ...]
    first: int

    def row_numbers(self, device: Any) -> torch.Tensor:
        """(S,) int64. The numbers by which micro-batches name their samples."""
        import torch

        start = (self.rollout_id << _ROLLOUT_BITS) + self.first
        return torch.arange(start, start + len(self.records), device=device)


def rollout_of(number: int) -> int:
    """The rollout of a row number."""
    return number >> _ROLLOUT_BITS


def record_of(generations: Mapping[int, Generation], number: int) -> SampleRecord:
    """The record of a row number.

    Raises:
        KeyError: Its generation is none of these.
    """
    generation = generations[rollout_of(number)]
    return generation.records[(number & ((1 << _ROLLOUT_BITS) - 1)) - generation.first]


def generation_of(
    rollout_id: int,
    output: Mapping[str, torch.Tensor],
    scored: Scored,
    *,
    trainer: Any,
    texts: bool,
) -> Generation:
    """Describe what `_generate_and_score_completions` returned.

    Args:
        rollout_id: The round.
        output: What it returned, for this rank.
        scored: What it was scored with.
        trainer: The trainer.
        texts: Whether prompts and completions are handed over to the redaction policy.
    """
    prompts, completions = output["prompt_mask"], output["completion_mask"]
    count, group = len(completions), int(trainer.num_generations)
    first = trainer.accelerator.process_index * count
    lengths = scored.lengths or completions.sum(1).tolist()
    prompt_lengths = prompts.sum(1).tolist()
    masks = (completions * output.get("tool_mask", 1)).tolist()
    raw = _total_rewards(trainer, scored.rewards[first : first + count])
    rewards = output["advantages"].tolist() if output["advantages"].ndim == 1 else [None] * count
    version = int(trainer.state.global_step)
    records = tuple(
        SampleRecord(
            sample_id=f"s-{rollout_id}-{first + row}",
            group_id=f"g-{rollout_id}-{(first + row) // group}",
            group_size=group,
            response_length=int(lengths[row]),
            total_length=int(prompt_lengths[row]) + int(lengths[row]),
            loss_mask=masks[row][: int(lengths[row])],
            raw_reward=raw[row],
            reward=rewards[row],
            source_rollout_id=rollout_id,
            weight_versions=((0, int(lengths[row]), version),),
            prompt=_text(scored.prompts, row) if texts else None,
            response=_text(scored.completions, row) if texts else None,
        )
        for row in range(count)
    )
    return Generation(rollout_id, records, first)


def _total_rewards(trainer: Any, rewards: torch.Tensor) -> list[float]:
    """The weighted sum of what the functions gave; NaN where none gave anything, as TRL has it."""
    weights = trainer.reward_weights.to(rewards.device)
    total = (rewards * weights.unsqueeze(0)).nansum(dim=1)
    total[rewards.isnan().all(dim=1)] = float("nan")
    found: list[float] = total.tolist()
    return found


def _text(values: Sequence[Any], row: int) -> str | None:
    """A text, or the contents of the messages of a conversation."""
    if row >= len(values):
        return None
    value = values[row]
    if isinstance(value, str):
        return value
    return "\n".join(str(one.get("content", "")) for one in value)


def tokens_of(output: Mapping[str, torch.Tensor], records: Sequence[SampleRecord]) -> list[Any]:
    """The token ids of each sample, prompt first, without padding."""
    import torch

    found = []
    for row, record in enumerate(records):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()]
        response = output["completion_ids"][row][: record.response_length]
        found.append(torch.cat([prompt, response]))
    return found

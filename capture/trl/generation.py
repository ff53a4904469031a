"""One generation of TRL: its samples as records, found again by a row number that rides along."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from trajreplay.schema.records import SampleRecord

if TYPE_CHECKING:
    import torch

ROW = "trajreplay_row"  # the key under which TRL shuffles and splits it with the tensors
_ROLLOUT_BITS = 32
_UNSCORED_APART = (1, 6)  # from here on a sample that no function scored is NaN, and 0 before


@dataclass
class Scored:
    """What the reward functions were given, and what they gave.

    Args:
        rewards: (N, F) float32. Rewards of the samples of all ranks; NaN where there is none. None
            where nobody knows them.
        prompts, completions: Those of this rank, as TRL holds them.
        lengths: Tokens of each response of this rank; None where TRL does not say.
    """

    rewards: torch.Tensor | None
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
        trained_tokens: Tokens that TRL divides by, of all ranks; None where it does not say.
    """

    rollout_id: int
    records: tuple[SampleRecord, ...]
    first: int
    trained_tokens: float | None = None

    def row_numbers(self) -> torch.Tensor:
        """(S,) int64, on the host. The numbers by which micro-batches name their samples."""
        import torch

        start = (self.rollout_id << _ROLLOUT_BITS) + self.first
        return torch.arange(start, start + len(self.records))


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
    scored: Scored | None,
    *,
    trainer: Any,
    texts: bool,
) -> Generation:
    """Describe what `_generate_and_score_completions` returned.

    Args:
        rollout_id: The round.
        output: What it returned, for this rank.
        scored: What it was scored with; None where other code than the trainer's own does that.
        trainer: The trainer.
        texts: Whether prompts and completions are handed over to the redaction policy.
    """
    prompts, completions = output["prompt_mask"], output["completion_mask"]
    count, group = len(completions), int(trainer.num_generations)
    first = trainer.accelerator.process_index * count
    told = scored or Scored(None)
    lengths = told.lengths or completions.sum(1).tolist()
    prompt_lengths = prompts.sum(1).tolist()
    masks = (completions * output.get("tool_mask", 1)).tolist()
    raw: list[float | None] = [None] * count
    parts: list[dict[str, float] | None] = [None] * count
    if told.rewards is not None:
        rewarded = told.rewards[first : first + count]
        totals = _total_rewards(trainer, rewarded)
        raw = [*totals]
        if names := component_names(trainer):
            parts = [dict(zip(names, one, strict=True)) for one in rewarded.tolist()]
            raw = [None if math.isnan(one) else one for one in totals]  # which nothing reads
    rewards = output["advantages"].tolist() if output["advantages"].ndim == 1 else [None] * count
    weights = int(trainer.state.global_step)
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
            reward_components=parts[row],
            source_rollout_id=rollout_id,
            weight_versions=((0, int(lengths[row]), weights),),
            prompt=_text(told.prompts, row) if texts else None,
            response=_text(told.completions, row) if texts else None,
        )
        for row in range(count)
    )
    tokens = output.get("num_items_in_batch")
    return Generation(rollout_id, records, first, None if tokens is None else float(tokens))


def component_names(trainer: Any) -> tuple[str, ...]:
    """The reward functions where each is normalised by itself; none where they are added up."""
    if getattr(trainer, "multi_objective_aggregation", "") != "normalize_then_sum":
        return ()
    return tuple(map(str, getattr(trainer, "reward_func_names", ())))


def _total_rewards(trainer: Any, rewards: torch.Tensor) -> list[float]:
    """The weighted sum of what the functions gave; what TRL takes where none gave any."""
    weights = trainer.reward_weights.to(rewards.device)
    total = (rewards * weights.unsqueeze(0)).nansum(dim=1)
    if _version() >= _UNSCORED_APART:
        total[rewards.isnan().all(dim=1)] = float("nan")
    found: list[float] = total.tolist()
    return found


@functools.cache
def _version() -> tuple[int, ...]:
    """The version of TRL: its first two numbers."""
    return tuple(int(one) for one in re.findall(r"\d+", version("trl"))[:2])


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

"""One sample as a producer hands it over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

from trajreplay.schema.errors import CaptureError, named, shown


class Values(Protocol):
    """Values of one sample: a list, or a torch, numpy or Arrow array."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...

    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One prompt with one response, as generated or as consumed by a step.

    Args:
        sample_id: Its id; unique within its rollout.
        group_index: The prompt's number; stored as `group_id` "g-<number>".
        group_id: The prompt's id as text, instead of `group_index`.
        response_length: Response tokens.
        total_length: Prompt and response tokens.
        loss_mask: `response_length` values of 0 or 1, of any type.
        raw_reward: Score given.
        reward: Score used, after post-processing.
        reward_components: Components of the score by name, of those that the settings weigh in
            `reward.weights`; one that is left out, None or NaN is missing.
        greedy_reward: Score of the greedy response to the same prompt.
        kept_baseline: Baseline that the trainer kept from earlier steps, as it was taken off.
        last_value: Critic's value past the last response token.
        source_rollout_id: Rollout that generated it; the capture's own if omitted.
        source_attempt: Attempt that generated it; the capture's own if omitted.
        group_size: Members that the group had when it was normalised, if known.
        weight_versions: (start, stop, version) spans of response tokens and the weights that
            sampled them.
        trajectory_id: The trajectory that it is a fragment of, where one was cut into several.
        context_rank, context_size: Which context-parallel shard of the sample this is, and of how
            many, where samples of one rank are cut differently; else the rank's coordinates hold.
        padded_length: Tokens that its sequence was padded to before context-parallel ranks cut it,
            where all of a batch are padded to one length; its own otherwise.
        fragment_index: Its place among those fragments, from 0: the step of an agent.
        agent_id, episode_id: Which agent of its environment, and in which run of that, where
            several agents act in one.
        turns: Turns of the model.
        first_message_length: Response tokens of its first message; all of them in a single turn.
        truncated: Whether it was cut at the length limit.
        prompt, response, label, tool_output: Text, stored only as the redaction policy allows.
    """

    sample_id: str
    response_length: int
    total_length: int
    loss_mask: Values
    group_index: int | None = None
    group_id: str | None = None
    group_size: int | None = None
    raw_reward: float | None = None
    reward: float | None = None
    reward_components: Mapping[str, float | None] | None = None
    greedy_reward: float | None = None
    kept_baseline: float | None = None
    last_value: float | None = None
    source_rollout_id: int | None = None
    source_attempt: int | None = None
    rollout_partition_id: str | None = None
    consumer_batch_id: str | None = None
    micro_batch_id: str | None = None
    trajectory_id: str | None = None
    context_rank: int | None = None
    context_size: int | None = None
    padded_length: int | None = None
    fragment_index: int | None = None
    agent_id: str | None = None
    episode_id: str | None = None
    turns: int | None = None
    first_message_length: int | None = None
    weight_versions: Sequence[tuple[int, int, int]] | None = None
    truncated: bool | None = None
    prompt: str | None = None
    response: str | None = None
    label: str | None = None
    tool_output: str | None = None

    @property
    def group(self) -> str | None:
        """The group's id, from either way of giving it.

        Raises:
            CaptureError: Both ways were used and disagree.
        """
        if self.group_index is None:
            return self.group_id
        group = f"g-{self.group_index}"
        if self.group_id is not None and self.group_id != group:
            raise CaptureError(
                f"sample {named(self.sample_id)} has group_index {shown(self.group_index)} and "
                f"group_id {named(self.group_id)}",
                hint="Give one of the two.",
            )
        return group


class SampleLists(Sequence[SampleRecord]):
    """Samples as one list for each field: a record of one is made when it is asked for.

    Args:
        rows: How many there are.
        fields: Values of fields of `SampleRecord`, in order; a field that is left out is None.
    """

    def __init__(self, rows: int, fields: Mapping[str, list[Any]]) -> None:
        self._rows, self._fields = rows, dict(fields)
        if any(len(values) != rows for values in fields.values()):
            raise ValueError(f"lists of other lengths than {rows}")

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, index: int) -> SampleRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[SampleRecord]: ...

    def __getitem__(self, index: int | slice) -> SampleRecord | list[SampleRecord]:
        if isinstance(index, slice):
            return [self[row] for row in range(self._rows)[index]]
        row = range(self._rows)[index]
        return SampleRecord(**{name: values[row] for name, values in self._fields.items()})

    def has(self, name: str) -> bool:
        """Whether a field is given."""
        return name in self._fields

    def values(self, name: str) -> list[Any]:
        """The values of a field, in order."""
        return self._fields.get(name) or [None] * self._rows

    def changed(self, **fields: list[Any]) -> SampleLists:
        """The same samples with other values of some fields."""
        return SampleLists(self._rows, {**self._fields, **fields})


def values_of(samples: Sequence[SampleRecord], name: str) -> list[Any]:
    """The values of a field of samples, in order."""
    if isinstance(samples, SampleLists):
        return samples.values(name)
    return [getattr(one, name) for one in samples]

"""Who gets what: requests to ranks, finished groups to consumer batches, samples to micro-batches.

Everything here is a pure function of what all ranks know, so that they agree without asking.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from trajreplay.cli.demo.config import TrainingConfig
from trajreplay.cli.demo.task import Prompt, draw_prompts


@dataclass(frozen=True)
class Request:
    """One response to be sampled, and the rank whose sampler is to do it."""

    sample_id: str
    group_index: int
    prompt: Prompt
    rollout_id: int
    partition_index: int
    rank: int


def plan_requests(config: TrainingConfig, rollout_id: int) -> list[Request]:
    """List what a rollout is to sample.

    The requests lie in prompt order and are dealt to the ranks in partitions of a fixed size. As
    that size is no multiple of the group's, the samples of a prompt often lie on two ranks.
    """
    prompts = draw_prompts(config.prompts_per_rollout, seed=config.seed, rollout_id=rollout_id)
    size = len(prompts) * config.samples_per_prompt
    requests = []
    for position in range(size):
        prompt_index = position // config.samples_per_prompt
        partition_index = position // config.partition_size
        requests.append(
            Request(
                sample_id=f"s-{rollout_id * size + position:04d}",
                group_index=rollout_id * len(prompts) + prompt_index,
                prompt=prompts[prompt_index],
                rollout_id=rollout_id,
                partition_index=partition_index,
                rank=partition_index % config.ranks,
            )
        )
    return requests


@dataclass(frozen=True)
class Arrival:
    """What all ranks are told of a finished sample, wherever it was sampled."""

    sample_id: str
    group_index: int
    response_length: int
    raw_reward: float


def stream_order(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """Order samples as they become usable: a group is handed on when its longest is finished."""
    arrivals = list(arrivals)
    finished_at: dict[int, int] = {}
    for arrival in arrivals:
        known = finished_at.get(arrival.group_index, 0)
        finished_at[arrival.group_index] = max(known, arrival.response_length)
    return sorted(arrivals, key=lambda a: (finished_at[a.group_index], a.group_index, a.sample_id))


class ConsumerStream:
    """The queue between sampling and training; every rank keeps the same one.

    Optimizer steps take their samples from its head, a fixed number at a time, whatever rollout or
    group they belong to. What is left when a rollout is used up waits for the next.

    >>> stream = ConsumerStream(batch_size=4)
    >>> stream.append(["a", "b", "c", "d", "e"])
    [0, 0, 0, 0, 1]
    >>> list(stream.full_batches())
    [['a', 'b', 'c', 'd']]
    >>> stream.append(["f", "g", "h"])
    [1, 1, 1]
    >>> list(stream.full_batches())
    [['e', 'f', 'g', 'h']]
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._waiting: deque[str] = deque()
        self._received = 0

    def append(self, sample_ids: Sequence[str]) -> list[int]:
        """Queue samples; give the index of the consumer batch that each of them falls into."""
        first = self._received
        self._waiting.extend(sample_ids)
        self._received += len(sample_ids)
        return [position // self._batch_size for position in range(first, self._received)]

    def full_batches(self) -> Iterable[list[str]]:
        """Take batches off the head for as long as full ones are there."""
        while len(self._waiting) >= self._batch_size:
            yield [self._waiting.popleft() for _ in range(self._batch_size)]


class Sized(Protocol):
    """Anything with a total length in tokens."""

    @property
    def total_length(self) -> int:
        """How many tokens it has."""


SizedT = TypeVar("SizedT", bound=Sized)


def pack_micro_batches(samples: Iterable[SizedT], token_budget: int) -> list[list[SizedT]]:
    """Cut samples, in order, into micro-batches of at most `token_budget` tokens.

    A sample that is longer than the budget is a micro-batch of its own.
    """
    batches: list[list[SizedT]] = []
    room = 0
    for sample in samples:
        if not batches or sample.total_length > room:
            batches.append([])
            room = token_budget
        batches[-1].append(sample)
        room -= sample.total_length
    return batches

"""Where the values of a sample are counted: by step, rank and length."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.schema.entry import Entry

Step = tuple[str, int, int, int | None]  # run, attempt, rollout and step; None at rollout level


@dataclass(frozen=True)
class RowKey:
    """What the samples of one capture have in common: where their values are counted."""

    run_id: str
    attempt: int
    rollout_id: int
    step_id: int | None
    rank: int
    length: int | None = None

    @property
    def step(self) -> Step:
        """The step, or at rollout level the rollout, over which means are taken."""
        return self.run_id, self.attempt, self.rollout_id, self.step_id


def bucket(count: int) -> int:
    """The bucket of a length or position: the largest power of two that it reaches, 0 below 256.

    >>> [bucket(one) for one in (0, 255, 256, 511, 512)]
    [0, 0, 256, 256, 512]
    """
    return 0 if count < 256 else 1 << (count.bit_length() - 1)


def step_of(entry: Entry) -> Step:
    """The step, or at rollout level the rollout, that a capture is of."""
    key = entry.key
    assert key.rollout_id is not None
    return key.run_id, key.attempt, key.rollout_id, key.step_id

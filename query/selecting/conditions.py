"""Conditions of a selection by name, as methods that select take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict


class CohortNames(TypedDict, total=False):
    """Which rollouts and steps; each as `Selection` has it."""

    run: str | None
    attempt: int | None
    rollouts: Sequence[int]
    steps: Sequence[tuple[int, int]]


class SampleNames(TypedDict, total=False):
    """Which samples, of whatever runs; each as `Selection` has it."""

    attempt: int | None
    rollouts: Sequence[int]
    steps: Sequence[tuple[int, int]]
    ranks: Sequence[int]
    samples: Sequence[str]
    groups: Sequence[str]
    batches: Sequence[str]


class Selecting(SampleNames, total=False):
    """All conditions, and how the samples are widened; each as `Selection` has it."""

    run: str | None
    stages: Sequence[str]
    closure: Literal["group", "cohort"] | None
    allow_partial: bool


class Paired(TypedDict, total=False):
    """How train is held against rollout; each as `trajreplay.query.mismatch.Pairing` has it."""

    runs: Sequence[str]
    pair: str
    any_version: bool
    memory_bytes: int
    threads: int | None
    progress: Callable[[int, int], None] | None


class PairedSamples(SampleNames, Paired, total=False):
    """The same, and of which samples."""

    allow_partial: bool


def parted(asked: PairedSamples) -> tuple[dict[str, Any], dict[str, Any]]:
    """What selects samples, and how train is held against rollout."""
    paired = {name: one for name, one in asked.items() if name in Paired.__annotations__}
    return {name: one for name, one in asked.items() if name not in paired}, paired

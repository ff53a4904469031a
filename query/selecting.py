"""Conditions of a selection by name, as methods that select take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict


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

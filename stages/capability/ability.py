"""The answer of a capability matrix about one stage."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.schema.contracts import Capability
from trajreplay.stages.reuse import UserKernel

Needs = tuple[tuple[str, ...], tuple[str, ...]]  # columns read, outputs compared
LOG_PROB_SOURCES = {"old": "old_log_probs", "rollout": "rollout_log_probs"}


@dataclass(frozen=True)
class Ability:
    """Whether a stage can be recomputed, and what it needs for that.

    Args:
        capability: recompute, inspect-only or unsupported.
        reason: Why it is less than recompute, naming the setting.
        reads: Columns that must be there.
        writes: Recorded columns and scalars that must be there to be compared.
        whole: Whether it takes all samples of the cohort, not only those of whole groups.
        kernel: The user's function that recomputes it; None for the stage's own arithmetic.
    """

    capability: Capability
    reason: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    whole: bool = False
    kernel: UserKernel | None = None

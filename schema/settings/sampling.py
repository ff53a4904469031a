"""What is allowed of the weights that sampled a response; no stage computes with it."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.schema.settings.knobs import count, flag


@dataclass(frozen=True)
class SamplingSettings:
    """Bounds on weight versions, held against those that were captured.

    Args:
        max_staleness: Versions that the oldest weights of a sample may be behind the weights that
            train on it; None where nobody states a bound.
        partial: Whether one response may be sampled by several weight versions (partial
            rollouts); None where that is not stated.
    """

    max_staleness: int | None = count(None)
    partial: bool | None = flag(None)

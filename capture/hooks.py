"""The calls of the recorder as plain functions, for training code that passes no object around.

Each does what the method of its name of `Recorder` does, for the recorder of this process, and
nothing where capture is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.capture.enabling import recorder

if TYPE_CHECKING:
    from trajreplay.schema import SampleRecord

__all__ = [
    "begin_rollout",
    "begin_step",
    "close",
    "describe_routes",
    "drop",
    "end_rollout",
    "end_step",
    "flush",
    "note",
    "promote",
    "record",
    "record_policy_loss",
    "record_scalars",
    "record_value_loss",
]


def describe_routes(
    num_experts: int | None = None, layer_numbers: Sequence[int] | None = None
) -> None:
    """As of `Recorder.describe_routes`."""
    recorder().describe_routes(num_experts, layer_numbers)


def begin_rollout(rollout_id: int, **options: Any) -> None:
    """As of `Recorder.begin_rollout`."""
    recorder().begin_rollout(rollout_id, **options)


def record(samples: Sequence[SampleRecord], **columns: Any) -> None:
    """As of `Recorder.record`."""
    recorder().record(samples, **columns)


def note(fate: str, sample_ids: Sequence[str], reason: str = "") -> None:
    """As of `Recorder.note`."""
    recorder().note(fate, sample_ids, reason)


def end_rollout() -> None:
    """As of `Recorder.end_rollout`."""
    recorder().end_rollout()


def begin_step(rollout_id: int, step_id: int, **options: Any) -> None:
    """As of `Recorder.begin_step`."""
    recorder().begin_step(rollout_id, step_id, **options)


def record_policy_loss(
    micro_batch: int | None, samples: Sequence[SampleRecord], **given: Any
) -> None:
    """As of `Recorder.record_policy_loss`."""
    if (one := recorder()).enabled:  # else handing everything on takes longer than all of this
        one.record_policy_loss(micro_batch, samples, **given)


def record_value_loss(
    micro_batch: int | None, samples: Sequence[SampleRecord], **given: Any
) -> None:
    """As of `Recorder.record_value_loss`."""
    if (one := recorder()).enabled:
        one.record_value_loss(micro_batch, samples, **given)


def record_scalars(
    stage: str, scalars: Mapping[str, Any], scope: str = "rank", **meaning: Any
) -> None:
    """As of `Recorder.record_scalars`."""
    recorder().record_scalars(stage, scalars, scope=scope, **meaning)


def end_step(**scalars: Any) -> None:
    """As of `Recorder.end_step`."""
    recorder().end_step(**scalars)


def drop(reason: str) -> None:
    """As of `Recorder.drop`."""
    recorder().drop(reason)


def promote(reason: str) -> None:
    """As of `Recorder.promote`."""
    recorder().promote(reason)


def flush(timeout_s: float | None = None) -> bool:
    """As of `Recorder.flush`."""
    return recorder().flush(timeout_s)


def close(timeout_s: float | None = None) -> bool:
    """As of `Recorder.close`: without it no clean end of the training is noted."""
    return recorder().close(timeout_s)

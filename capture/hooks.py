"""The calls of the recorder as plain functions, for training code that passes no object around.

Each does what the method of its name of `Recorder` does, for the recorder of this process, and
nothing where capture is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.capture.enabling import recorder

if TYPE_CHECKING:
    from trajreplay.schema import SampleRecord

__all__ = [
    "begin_rollout",
    "begin_step",
    "end_rollout",
    "end_step",
    "record",
    "record_policy_loss",
    "record_value_loss",
]


def begin_rollout(rollout_id: int, **options: Any) -> None:
    """As of `Recorder.begin_rollout`."""
    recorder().begin_rollout(rollout_id, **options)


def record(samples: Sequence[SampleRecord], **columns: Any) -> None:
    """As of `Recorder.record`."""
    recorder().record(samples, **columns)


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


def end_step(**scalars: Any) -> None:
    """As of `Recorder.end_step`."""
    recorder().end_step(**scalars)

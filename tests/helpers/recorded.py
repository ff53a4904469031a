"""A small training that is captured by the recorder, as a trainer would call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.helpers.captures import entries_of
from tests.helpers.cohorts import ROLLOUT_COLUMNS, ROLLOUT_STAGES, STEP_COLUMNS, record
from tests.helpers.scenes import WAY, drawn
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake, capture
from trajreplay.capture import Recorder, Switches
from trajreplay.schema.entry import Entry

MICRO_BATCH = 2


def switched(lake: Lake | str, **changes: Any) -> Switches:
    """Switches of a run in a lake; errors are raised unless the changes say otherwise."""
    path = lake if isinstance(lake, str) else lake.path
    return Switches(lake=path, run_id="r", **{"strict": True, "close_s": 20.0, **changes})


def enabled(lake: Lake | str, **changes: Any) -> Recorder:
    """A recorder of the small training."""
    options = {
        name: changes.pop(name)
        for name in ("rank", "expected_ranks", "attempt", "resume_rollout_id")
        if name in changes
    }
    return capture.enable(
        switched(lake, **changes), settings=WAY.short, rollout_stages=ROLLOUT_STAGES, **options
    )


def record_rollout(recorder: Recorder, rollout_id: int = 0) -> list[Sample]:
    """Record one rollout and return its samples."""
    samples = drawn(rollout_id=rollout_id)
    columns: dict[str, Any] = {
        name: [one.columns[name] for one in samples] for name in ROLLOUT_COLUMNS
    }
    with recorder.rollout(rollout_id):
        recorder.record(
            [record(one, ("micro_batch_id",), step=False) for one in samples], **columns
        )
    return samples


def micro_batch(
    recorder: Recorder, index: int | None, samples: Sequence[Sample], **changes: Any
) -> None:
    """Record one micro-batch of the open step, with its loss."""
    given: dict[str, Any] = {name: [one.columns[name] for one in samples] for name in STEP_COLUMNS}
    scalars = Trainer(WAY).loss(samples)
    recorder.record_policy_loss(
        index,
        [record(one, ("micro_batch_id",)) for one in samples],
        changes.pop("scalars", scalars),
        reduction="sum",
        columns={**given, **changes},
    )


def record_step(
    recorder: Recorder, samples: Sequence[Sample], rollout_id: int = 0, step_id: int = 0
) -> None:
    """Record an optimizer step of micro-batches of two samples."""
    with recorder.step(rollout_id, step_id):
        for at in range(0, len(samples), MICRO_BATCH):
            micro_batch(recorder, at // MICRO_BATCH, samples[at : at + MICRO_BATCH])


def captured(lake: Lake) -> list[Entry]:
    """Every entry of samples, in order of path; heartbeats are none."""
    return [one for one in entries_of(lake) if one.key.kind != "events"]


def reasons(lake: Lake) -> list[str]:
    """Why captures were dropped, in order of path."""
    return [one.reason for one in captured(lake) if one.status == "dropped"]

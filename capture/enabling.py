"""Switching capture on, once a process, and the recorder that everything in it then finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trajreplay.capture.recorder import Recorder
from trajreplay.capture.switching.ranks import agree, is_distributed, own_process
from trajreplay.capture.switching.switches import ATTEMPT, Switches
from trajreplay.schema.errors import CaptureError, DatasetError
from trajreplay.schema.identity import ProducerInfo

if TYPE_CHECKING:
    from trajreplay.schema import (
        ParallelCoordinates,
        RecomputeConfig,
        Settings,
        StageContract,
    )

ROLLOUT_STAGES = ("sample", "reward.raw", "reward.post_process", "advantage.estimate")
STEP_STAGES = ("sample", "loss.policy")
_DISABLED = Recorder()
_in_use = [_DISABLED]


def recorder() -> Recorder:
    """The recorder of this process: that of the last `enable`, or one that does nothing."""
    return _in_use[0]


def enable_from_env(**options: Any) -> Recorder:
    """Capture if the environment says so.

    Args:
        options: Arguments of `enable`, but the switches.

    Returns:
        The recorder; one that does nothing unless `TRAJREPLAY_CAPTURE=1`.

    Raises:
        SchemaError: A switch is malformed, or an argument is wrong.
    """
    switches = Switches.from_env()
    return _set(_DISABLED) if switches is None else enable(switches, **options)


def enable(
    switches: Switches,
    *,
    settings: Settings | RecomputeConfig | None = None,
    rollout_stages: Sequence[str | StageContract] = ROLLOUT_STAGES,
    step_stages: Sequence[str | StageContract] = STEP_STAGES,
    rank: int | None = None,
    expected_ranks: Sequence[int] | None = None,
    attempt: int | None = None,
    resume_rollout_id: int | None = None,
    parallel: ParallelCoordinates | None = None,
    producer: ProducerInfo | None = None,
    records: bool | None = None,
    group: Any = None,
    alone: bool = False,
    shared: bool = True,
) -> Recorder:
    """Capture from now on. Where torch.distributed is initialised, every rank calls it.

    Args:
        switches: Where to, what, and at what cost.
        settings: The arithmetic in force; a rollout or step may state its own, and has to where
            it is omitted here.
        rollout_stages: Stages that can be recomputed from what is recorded of a rollout.
        step_stages: Likewise of a step.
        rank: This process; that of torch.distributed if omitted.
        expected_ranks: The ranks that record; those that say so if omitted.
        attempt: Restart of the run; that of the switches, or the next one of the lake, reserved by
            rank 0, if omitted.
        resume_rollout_id: Where training resumed, the first rollout that it does anew.
        parallel: Where this rank stands in each parallel dimension.
        producer: The program that captures; its texts are of one line and 128 characters at most.
        records: Whether this rank has something to record; by default where it is the first of
            its tensor-parallel group, since the others hold copies, and on the last pipeline
            stage, since the others compute no loss.
        group: The process group that records, where it is not all processes; they call it.
        alone: Whether this process is the only one that records, and asks no others.
        shared: Whether it becomes the recorder of this process, in the place of the one before.
            One that does and takes no steps is warned of where no attempt is given that it shares
            with the trainers.

    Returns:
        The recorder; one that does nothing where this rank records nothing, or where the ranks
        cannot agree on an attempt or the lake cannot be written, which is warned of.

    Raises:
        SchemaError: An argument is wrong.
        CaptureError: Under `strict`, what is only warned of otherwise.
        DatasetError: Likewise.
    """
    from trajreplay.capture.declared import check_said
    from trajreplay.capture.live import LiveRecorder
    from trajreplay.capture.reasons import warn
    from trajreplay.capture.writing.spool import prepare

    for stages in (rollout_stages, step_stages):
        check_said(settings, stages, producer=producer, parallel=parallel)
    number = switches.attempt if attempt is None else attempt
    role = "train" if producer is None else producer.role
    if number is None and shared and role != "train" and (alone or not is_distributed()):
        warn(
            f"a process of the role {role} captures an attempt of its own, which no trainer's "
            "steps are compared with: give it and the trainers the same attempt, by "
            f"{ATTEMPT} or enable(attempt=...)"
        )
    mine = records
    if mine is None:
        mine = parallel is None or parallel.is_owner
    try:
        place = agree(
            switches.lake,
            switches.run_id,
            records=mine,
            rank=rank,
            expected_ranks=expected_ranks,
            attempt=number,
            resume_rollout_id=resume_rollout_id,
            group=group,
            alone=alone,
        )
        if mine and switches.spool:
            prepare(switches.spool, switches.lake)
    except (CaptureError, DatasetError, OSError) as error:
        if switches.strict:
            raise
        warn(f"nothing is captured: {error}")
        mine = False
    found = _DISABLED
    if mine:
        found = LiveRecorder(
            switches,
            place,
            settings=settings,
            rollout_stages=rollout_stages,
            step_stages=step_stages,
            identity={"parallel": parallel, "producer": _as_process(producer)},
        )
    return _set(found) if shared else found


def _as_process(producer: ProducerInfo | None) -> ProducerInfo | None:
    """The producer, and which process of the job it is, where torch.distributed says so."""
    process = own_process()
    if process is None:
        return producer
    said = producer or ProducerInfo()
    return replace(said, extra={**said.extra, **process.to_extra()})


def _set(chosen: Recorder) -> Recorder:
    """Make it the recorder of this process, and end the one before."""
    if _in_use[0] is not chosen:
        _in_use[0].retire()
    _in_use[0] = chosen
    return chosen

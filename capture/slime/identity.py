"""Who this process of slime is, and which of the rollout's samples a row of a micro-batch is."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

from trajreplay.capture.enabling import enable_from_env, recorder
from trajreplay.capture.recorder import Recorder
from trajreplay.schema.identity import ParallelCoordinates, ProducerInfo

_asked: list[bool] = []


def started(args: Any) -> Recorder:
    """The recorder of this process, which the first call enables.

    Args:
        args: slime's arguments.

    Raises:
        SchemaError: At the first call, a switch is malformed.
    """
    if not _asked:
        _asked.append(True)
        here = place()
        last = here.pipeline_rank == here.pipeline_size - 1  # the others hold no log-probs
        enable_from_env(
            parallel=here,
            producer=ProducerInfo(framework="slime"),
            records=last and here.tensor_rank == 0,
            resume_rollout_id=getattr(args, "start_rollout_id", None) or None,
        )
    return recorder()


def place() -> ParallelCoordinates:
    """Megatron's coordinates where it is in use; it is never loaded here."""
    mpu = getattr(sys.modules.get("megatron.core"), "mpu", None)
    if mpu is None or not mpu.model_parallel_is_initialized():
        return ParallelCoordinates()
    return ParallelCoordinates(
        data_rank=mpu.get_data_parallel_rank(),
        data_size=mpu.get_data_parallel_world_size(),
        tensor_rank=mpu.get_tensor_model_parallel_rank(),
        tensor_size=mpu.get_tensor_model_parallel_world_size(),
        pipeline_rank=mpu.get_pipeline_model_parallel_rank(),
        pipeline_size=mpu.get_pipeline_model_parallel_world_size(),
        context_rank=mpu.get_context_parallel_rank(),
        context_size=mpu.get_context_parallel_world_size(),
    )


def sample_id(index: int) -> str:
    """The name of a sample by the number that slime gave it."""
    return f"s-{int(index)}"


class Named:
    """Samples of the rollout that is trained on, by the tensors of their tokens.

    What slime hands to a loss has no number of a sample, and the same tensors as the rollout.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        self._rollout_id = -1
        self._count = 0
        self._alone = True

    def note(self, rollout_id: int, data: Mapping[str, Any]) -> None:
        """Note the samples of a rollout; those of the one before are forgotten."""
        self._rollout_id = rollout_id
        own = [max(int(one.sum()), 1) for one in data["loss_masks"]]
        sums = data.get("rollout_mask_sums")
        self._alone = sums is None or [int(one) for one in sums] == own
        self._count = len(own)
        pairs = zip(data["tokens"], data["sample_indices"], strict=True)
        self._known = {id(one): (weakref.ref(one), int(index)) for one, index in pairs}

    def alone(self, rollout_id: int) -> bool | None:
        """Whether what slime divides by are the trained tokens of each sample alone."""
        return self._alone if rollout_id == self._rollout_id else None

    def count(self, rollout_id: int) -> int | None:
        """How many samples this rank has of a rollout; None where it was not noted."""
        return self._count if rollout_id == self._rollout_id else None

    def index_of(self, rollout_id: int, tokens: Any) -> int | None:
        """The number of a sample; None where its rollout was not noted."""
        found = self._known.get(id(tokens)) if rollout_id == self._rollout_id else None
        return found[1] if found is not None and found[0]() is tokens else None


NAMED = Named()

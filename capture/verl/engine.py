"""Optimizer steps of an engine of verl: where each begins and ends, and what of it was lost."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trajreplay.capture.enabling import enable
from trajreplay.capture.recorder import Recorder
from trajreplay.capture.switching.switches import Switches
from trajreplay.capture.verl.rows import producer
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.settings import Settings

_DISTILLATION = "verl.trainer.distillation"
_ENGINE = (
    "optimizer_step",
    "lr_scheduler_step",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_data_parallel_group",
    "is_mp_src_rank_with_outputs",
)
Steps = Mapping[str, Any]


class Worker:
    """Records the losses of one engine, micro-batch by micro-batch.

    An engine of verl calls the loss of each micro-batch, then its own `optimizer_step`, and after
    the last step of a batch its own `lr_scheduler_step`: these two methods of the one engine are
    wrapped when it is first seen.

    Args:
        switches: What to capture.
        suffix: Is appended to the run.
    """

    _in_graph: str  # the argument of a loss that is in a graph where it trains

    def __init__(self, switches: Switches, suffix: str = "") -> None:
        self.switches = replace(switches, run_id=switches.run_id + suffix)
        self._recorder: Recorder | None = None
        self._undo: list[Callable[[], None]] = []
        self._rollout_id = self._step_id = 0
        self._begun, self._lost = False, ""
        self._micro_batches = self._rows = 0
        self._data_rank = 0

    def before(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Mapping[str, Any] | None:
        """What a loss is called with, by name; None where it trains nothing."""
        torch = sys.modules["torch"]
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        if not torch.is_grad_enabled() or not given.arguments[self._in_graph].requires_grad:
            return None
        recorder = self._recorder
        if recorder is None:
            recorder = self._started()
        return given.arguments if recorder.enabled else None

    def begin(self, told: Callable[[], Steps]) -> Recorder:
        """The recorder, with the step of this micro-batch begun.

        Args:
            told: Makes the settings and stages of a step that begins now. Where it cannot, the
                step is begun all the same, so that the lake lacks none.
        """
        recorder = self._recorder
        assert recorder is not None
        if not self._begun:
            self._begun = True
            try:
                steps = told()
            except Exception:
                recorder.begin_step(self._rollout_id, self._step_id, settings=Settings())
                raise
            recorder.begin_step(self._rollout_id, self._step_id, **steps)
        if self._lost:
            recorder.drop(self._lost)
            self._lost = ""
        return recorder

    def records(self, lengths: list[int]) -> list[SampleRecord]:
        """Records of the next rows of this step, which verl has no names for."""
        first, self._rows = self._rows, self._rows + len(lengths)
        return [
            SampleRecord(f"s-{self._step_id}-{self._data_rank}-{first + row}", length, length, ())
            for row, length in enumerate(lengths)
        ]

    def next_micro_batch(self) -> int:
        """The number of this micro-batch."""
        self._micro_batches += 1
        return self._micro_batches - 1

    def failed(self, error: Exception) -> None:
        """A micro-batch could not be looked at: its step is given up, and the lake says so."""
        self._lost = f"loss-not-seen:{type(error).__name__}"
        if self._recorder is not None:  # else the step is begun with the next one
            self.begin(lambda: {"settings": Settings()})

    def _started(self) -> Recorder:
        """The recorder, from the first loss that an engine asks for."""
        engine = _calling_engine()
        if engine is None:
            raise CaptureError("a loss was computed by no engine of verl >= 0.9")
        self._recorder = Recorder()  # whatever goes wrong below goes wrong once
        if engine.is_mp_src_rank_with_outputs():  # the others hold copies, or no log-probs
            self._data_rank = int(engine.get_data_parallel_rank())
            self._rollout_id = _batches_trained(engine)
            self._recorder = enable(
                self.switches,
                rank=self._data_rank,
                resume_rollout_id=self._rollout_id or None,
                group=engine.get_data_parallel_group(),
                parallel=ParallelCoordinates(
                    data_rank=self._data_rank, data_size=int(engine.get_data_parallel_size())
                ),
                producer=producer(),
                shared=False,
            )
        if self._recorder.enabled:
            self._undo = [
                _after(engine, "optimizer_step", self._end_step),
                _after(engine, "lr_scheduler_step", self._end_rollout),
            ]
        return self._recorder

    def _end_step(self, grad_norm: Any) -> None:
        if self._recorder is None or not self._begun:
            return
        known = {} if grad_norm is None else {"grad_norm": grad_norm}
        self._recorder.end_step(**known)
        self._begun = False
        self._micro_batches = self._rows = 0
        self._step_id += 1

    def _end_rollout(self, _: Any) -> None:
        self._rollout_id, self._step_id = self._rollout_id + 1, 0

    def close(self) -> None:
        """End recording, and leave the engine as it was."""
        for one in self._undo:
            one()
        self._undo = []
        if self._recorder is not None:
            self._recorder.close()


def _after(engine: Any, name: str, tell: Callable[[Any], None]) -> Callable[[], None]:
    """Have a method of one engine tell what it returned; what takes that back is returned."""
    original = getattr(engine, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        tell(result)
        return result

    def undo() -> None:
        if vars(engine).get(name) is call:
            delattr(engine, name)

    setattr(engine, name, call)
    return undo


def _batches_trained(engine: Any) -> int:
    """Batches that an engine was trained on before, as its schedule of learning rates counts.

    A checkpoint brings the schedule back. 0 where it does not say.
    """
    known = getattr(getattr(engine, "lr_scheduler", None), "last_epoch", 0)
    return known if type(known) is int and known > 0 else 0


def _calling_engine() -> Any:
    """The engine whose loss is computed: it is among those who called."""
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_DISTILLATION):
            return None
        found = frame.f_locals.get("self")
        if all(hasattr(type(found), one) for one in _ENGINE):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None

"""The actor of verl: every policy loss of an optimizer step, and where that step ends."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trajreplay.capture.enabling import enable
from trajreplay.capture.recorder import Recorder
from trajreplay.capture.switches import Switches
from trajreplay.capture.verl.rows import lengths_of, producer
from trajreplay.capture.verl.settings import loss_contract, loss_meaning, loss_settings
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.records import SampleRecord

_DISTILLATION = "verl.trainer.distillation"
_ENGINE = (
    "optimizer_step",
    "lr_scheduler_step",
    "get_data_parallel_rank",
    "get_data_parallel_size",
    "get_data_parallel_group",
    "is_mp_src_rank_with_outputs",
)


class Actor:
    """Records the policy losses of one process.

    An engine of verl calls the loss of each micro-batch, then its own `optimizer_step`, and after
    the last step of a batch its own `lr_scheduler_step`: these two methods of the one engine are
    wrapped when it is first seen.

    Args:
        switches: What to capture.
    """

    def __init__(self, switches: Switches) -> None:
        self.switches = switches
        self._recorder: Recorder | None = None
        self._rollout_id = self._step_id = 0
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
        if not torch.is_grad_enabled() or not given.arguments["log_prob"].requires_grad:
            return None
        recorder = self._recorder
        if recorder is None:
            recorder = self._started()
        return given.arguments if recorder.enabled else None

    def after(self, name: str, given: Mapping[str, Any], result: Any) -> None:
        """Record one micro-batch with its loss."""
        recorder = self._recorder
        assert recorder is not None
        with recorder.guard("policy loss"):
            self._record(recorder, name, given, result[0])

    def _record(self, recorder: Recorder, name: str, given: Mapping[str, Any], loss: Any) -> None:
        mode, config, mask = given["loss_agg_mode"], given["config"], given["response_mask"]
        if not self._micro_batches:
            weighted = given.get("rollout_is_weights") is not None
            recorder.begin_step(
                self._rollout_id,
                self._step_id,
                settings=loss_settings(name, mode, config),
                stages=[StageContract("sample"), loss_contract(name, mode, weighted)],
            )
        lengths = lengths_of(mask)
        first = self._rows
        records = [
            SampleRecord(f"s-{self._step_id}-{self._data_rank}-{first + row}", length, length, ())
            for row, length in enumerate(lengths)
        ]
        recorder.record_policy_loss(
            self._micro_batches,
            records,
            scalars={"loss": loss, "pg_loss": loss},  # entropy and KL are added elsewhere
            log_probs=given["log_prob"],
            old_log_probs=given["old_log_prob"],
            advantages=given["advantages"],
            origins={"log_probs": {"source": "trainer"}, "old_log_probs": {"source": "trainer"}},
            columns={"loss_mask": mask},
            **loss_meaning(name, mode, config, mask.shape[1]),
        )
        self._micro_batches += 1
        self._rows += len(records)

    def _started(self) -> Recorder:
        """The recorder, from the first loss that an engine asks for."""
        engine = _calling_engine()
        if engine is None:
            raise CaptureError("a policy loss was computed by no engine of verl >= 0.9")
        self._recorder = Recorder()  # whatever goes wrong below goes wrong once
        if engine.is_mp_src_rank_with_outputs():  # the others hold copies, or no log-probs
            self._data_rank = int(engine.get_data_parallel_rank())
            place = ParallelCoordinates(
                data_rank=self._data_rank, data_size=int(engine.get_data_parallel_size())
            )
            self._recorder = enable(
                self.switches,
                rank=self._data_rank,
                group=engine.get_data_parallel_group(),
                parallel=place,
                producer=producer(),
                shared=False,
            )
        if self._recorder.enabled:
            _after(engine, "optimizer_step", self._end_step)
            _after(engine, "lr_scheduler_step", self._end_rollout)
        return self._recorder

    def _end_step(self, grad_norm: Any) -> None:
        if self._recorder is None or not self._micro_batches:
            return
        known = {} if grad_norm is None else {"grad_norm": grad_norm}
        self._recorder.end_step(**known)
        self._micro_batches = self._rows = 0
        self._step_id += 1

    def _end_rollout(self, _: Any) -> None:
        self._rollout_id, self._step_id = self._rollout_id + 1, 0

    def close(self) -> None:
        """End recording."""
        if self._recorder is not None:
            self._recorder.close()


def _after(engine: Any, name: str, tell: Callable[[Any], None]) -> None:
    """Have a method of one engine tell what it returned."""
    original = getattr(engine, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        tell(result)
        return result

    setattr(engine, name, call)


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

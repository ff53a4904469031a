"""How capture comes to a trainer of TRL: a callback in its list, or a call after it is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from trajreplay.capture.enabling import enable
from trajreplay.capture.reasons import warn
from trajreplay.capture.recorder import Recorder
from trajreplay.capture.switching.switches import Switches
from trajreplay.capture.trl.hooks import METHODS, Hooks
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.identity import ParallelCoordinates, ProducerInfo

_TEXTS = ("prompt", "response")


def attach(trainer: Any, switches: Switches | None = None) -> None:
    """Capture what a trainer of TRL does from its next `train` on.

    Args:
        trainer: A GRPOTrainer, or one that is made of it.
        switches: What to capture; what the environment says if omitted, and nothing where that
            does not say so.

    Raises:
        SchemaError: A switch is malformed.
        CaptureError: The trainer has no such methods as TRL >= 0.22 has.
    """
    callback = TrajReplayCallback(switches)
    if callback.switches is not None:
        _check(trainer)
        callback.trainer = trainer
        trainer.add_callback(callback)


class TrajReplayCallback:
    """Captures the training of the trainer that calls it: `callbacks=[TrajReplayCallback()]`.

    Args:
        switches: What to capture; what the environment says if omitted, and nothing where that
            does not say so.

    Raises:
        SchemaError: A switch is malformed.
    """

    def __init__(self, switches: Switches | None = None) -> None:
        self.switches = Switches.from_env() if switches is None else switches
        self.trainer: Any = None
        self._hooks: Hooks | None = None
        self._recorder = Recorder()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Agree with the other ranks, and wrap the methods of the trainer."""
        if self.switches is None:
            return
        if self._hooks is not None:  # the training before did not end, and is begun again
            self._hooks.remove()
            self._hooks = None
        trainer = self.trainer or _calling_trainer()
        try:
            _check(trainer)
        except CaptureError as error:
            warn(f"nothing is captured: {error}")
            return
        generated = int(trainer.args.steps_per_generation) * int(trainer.num_iterations)
        trained = int(state.global_step) * int(args.gradient_accumulation_steps)
        first = trained // generated
        if trained % generated:
            warn(
                f"training resumes within generation {first}: the attempt before is followed up to "
                "it, and its steps of that generation are superseded; save at the end of one"
            )
        self._recorder = enable(
            self.switches,
            resume_rollout_id=first if state.global_step else None,
            parallel=ParallelCoordinates(
                data_rank=trainer.accelerator.process_index,
                data_size=trainer.accelerator.num_processes,
            ),
            producer=_producer(),
        )
        if self._recorder.enabled:
            texts = any(self.switches.redaction.get(one, "drop") != "drop" for one in _TEXTS)
            self._hooks = Hooks(
                trainer,
                self._recorder,
                first_rollout=first,
                texts=texts,
                ratios=any(one == "ratio" for one, _, _ in self.switches.triggers.bounds),
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step of a trainer that does not tell the norm of its gradients."""
        if self._hooks is not None:
            with self._recorder.guard("step"):
                self._hooks.end_step_if_done()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what is left, and leave the trainer as it was."""
        if self._hooks is None:
            return
        self._hooks.remove()
        if not self._hooks.steps:
            warn("training ended and took no optimizer step: is the dataset smaller than a batch?")
        self._hooks = None
        self._recorder.close()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Any other event of a trainer, of whichever version, is of no interest."""
        if name.startswith("on_"):
            return _ignore
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Take an event."""


def _check(trainer: Any) -> None:
    lacking = [name for name in METHODS if not callable(getattr(trainer, name, None))]
    if lacking:
        raise CaptureError(
            f"{type(trainer).__name__} has no {', '.join(lacking)}, expected a GRPOTrainer of "
            "TRL >= 0.22",
            hint="Other trainers record through trajreplay.capture.Recorder.",
        )
    if getattr(trainer, "use_liger_kernel", False) and hasattr(trainer, "compute_liger_loss"):
        raise CaptureError(
            "use_liger_kernel is on, and this version of TRL then computes its loss elsewhere",
            hint="Switch it off, or use TRL >= 1.16.",
        )


def _calling_trainer() -> Any:
    """The trainer that fires the event: it is among those who called."""
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if all(hasattr(type(found), name) for name in METHODS):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _producer() -> ProducerInfo:
    from importlib.metadata import version

    import torch

    return ProducerInfo(torch_version=str(torch.__version__), framework=f"trl {version('trl')}")

"""What keeps a training from whatever goes wrong in its recorder: guarded methods and blocks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from trajreplay.capture.reasons import reason_of
from trajreplay.capture.recorder import Recorder

Level = Literal["rollout", "step"]
_TOLD = (
    *("begin_rollout", "record", "end_rollout", "begin_step", "end_step"),
    *("record_policy_loss", "record_value_loss", "record_scalars"),
)


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Keep whatever goes wrong in a method from the trainer that calls it."""

    @functools.wraps(method)
    def call(self: Guarded, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - a training never fails for its recorder
            self.failed(method.__name__, error)

    return call


def uncompiled(recorder: Recorder) -> None:
    """Have torch.compile leave the calls of a recorder as they are, and compile around them.

    Done once, and not before a program compiles something: loading what compiles takes a second.
    """
    if "torch._dynamo" in sys.modules and "record" not in vars(recorder):
        torch = sys.modules["torch"]
        for name in _TOLD:
            setattr(recorder, name, torch.compiler.disable(getattr(recorder, name)))


class Guarded(Recorder):
    """The blocks of a recorder that records; see `Recorder`."""

    def failed(self, where: str, error: Exception) -> None:
        """Give up what was being recorded, and warn once; raise where that is asked for."""
        raise NotImplementedError

    def interrupted(self, level: Level, reason: str) -> None:
        """Give up what is open, since an exception ends the block of a rollout or step."""
        raise NotImplementedError

    @contextmanager
    def guard(self, where: str) -> Iterator[None]:
        """As of `Recorder`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as of a guarded method
            self.failed(where, error)

    @contextmanager
    def rollout(self, rollout_id: int, **options: Any) -> Iterator[None]:
        """As of `Recorder`."""
        self.begin_rollout(rollout_id, **options)
        with self._dropping("rollout"):
            yield
        self.end_rollout()

    @contextmanager
    def step(self, rollout_id: int, step_id: int, **options: Any) -> Iterator[None]:
        """As of `Recorder`."""
        self.begin_step(rollout_id, step_id, **options)
        with self._dropping("step"):
            yield
        self.end_step()

    @contextmanager
    def _dropping(self, level: Level) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.interrupted(level, f"the {level} ended with {reason_of(error)}")
            raise

"""What keeps a training from whatever goes wrong in its recorder: guarded methods and blocks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

from trajreplay.capture.reasons import warn
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
            self.kept(method.__name__, error)

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

    def kept(self, where: str, error: Exception) -> None:
        """As `failed`; what goes wrong while that is noted does not reach the trainer either."""
        try:
            self.failed(where, error)
        except Exception as other:
            if other is error:  # raised because that is asked for
                raise
            warn(f"{where}: {type(error).__name__}; to note it: {type(other).__name__}")

    def interrupted(self, level: Level, error: BaseException) -> None:
        """Give up what is open, since an exception ends the block of a rollout or step."""
        raise NotImplementedError

    @contextmanager
    def guard(self, where: str) -> Iterator[None]:
        """As of `Recorder`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as of a guarded method
            self.kept(where, error)

    def rollout(self, rollout_id: int, **options: Any) -> AbstractContextManager[None]:
        """As of `Recorder`."""
        begin = functools.partial(self.begin_rollout, rollout_id, **options)
        return _Block(self, "rollout", begin, self.end_rollout)

    def step(self, rollout_id: int, step_id: int, **options: Any) -> AbstractContextManager[None]:
        """As of `Recorder`."""
        begin = functools.partial(self.begin_step, rollout_id, step_id, **options)
        return _Block(self, "step", begin, self.end_step)


class _Block:
    """A rollout or step as a block; for less than what a generator takes."""

    __slots__ = ("_begin", "_end", "_level", "_recorder")

    def __init__(
        self, recorder: Guarded, level: Level, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._recorder, self._level, self._begin, self._end = recorder, level, begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            self._end()
        else:
            self._recorder.interrupted(self._level, error)

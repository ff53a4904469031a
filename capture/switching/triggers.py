"""What makes a flight recorder write what it holds: numbers out of bounds, a signal, a crash."""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from trajreplay.capture.reasons import reason_of
from trajreplay.capture.taking.device import DeviceScalar
from trajreplay.schema.errors import SchemaError, bare, shown

_BOUND = re.compile(r"(\w+)([<>])([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, ">": operator.gt}
NON_FINITE, EXCEPTION, SIGNAL = "nonfinite", "exception", "signal:"
# Signals by which a program is asked for something, or that end none.
_ASKING = ("SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH")
_AGAIN_S = 0.001
TOLD_WITHIN = 8  # steps; a scalar may be told of some of them only
DEFAULT = f"{NON_FINITE},{EXCEPTION}"


@dataclass(frozen=True)
class Triggers:
    """When the last steps are written.

    Args:
        text: `nonfinite`, a scalar that is NaN or infinite; a bound such as `loss>5`, on any
            scalar that is recorded; `exception`, one that ends the program; `signal:USR1`; several
            with commas.

    Raises:
        SchemaError: The text has another form.

    >>> Triggers("nonfinite,kl_loss>0.5").fired({"loss": [1.0], "kl_loss": [0.2, 0.7]})
    {'kl_loss>0.5': 'kl_loss is 0.7: kl_loss>0.5'}
    """

    text: str = DEFAULT
    bounds: tuple[tuple[str, str, float], ...] = field(init=False, repr=False, compare=False)
    signals: tuple[signal.Signals, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise _malformed(shown(self.text))
        bounds, signals = [], []
        for part in self._parts():
            if found := _BOUND.fullmatch(part):
                bounds.append((found[1], found[2], float(found[3])))
            elif part.startswith(SIGNAL):
                signals.append(_signal(part))
            elif part not in (NON_FINITE, EXCEPTION):
                raise _malformed(part)
        object.__setattr__(self, "bounds", tuple(bounds))
        object.__setattr__(self, "signals", tuple(signals))

    def _parts(self) -> list[str]:
        return [one.strip() for one in self.text.split(",")]

    @property
    def on_exception(self) -> bool:
        """Whether an exception that ends the program is one."""
        return EXCEPTION in self._parts()

    def fired(self, scalars: Mapping[str, Sequence[float]]) -> dict[str, str]:
        """Which of them the scalars of a step, any value of any of them, set off, and why."""
        found: dict[str, str] = {}
        if NON_FINITE in self._parts():
            for name, values in scalars.items():
                for value in values:
                    if not math.isfinite(value):
                        found.setdefault(NON_FINITE, f"{bare(name)} is {value}")
        for name, sign, bound in self.bounds:
            for value in scalars.get(name, ()):
                if _COMPARE[sign](value, bound):
                    part = f"{name}{sign}{bound:g}"
                    found.setdefault(part, f"{name} is {value:g}: {part}")
        return found

    def install(
        self,
        promote: Callable[[str], None],
        flush: Callable[[], object],
        warned: Callable[[str], None],
    ) -> Callable[[], None]:
        """Call `promote` on a signal, or an exception that ends the program.

        A signal that would have ended the program ends it once `flush` returns.

        Args:
            promote: Takes the reason.
            flush: Waits until what was promoted is written.
            warned: Is told of what cannot be watched.

        Returns:
            Takes it back.
        """
        undo: list[Callable[[], None]] = []
        if self.on_exception:
            undo.append(_on_exception(promote))
        untaken = []
        for one in self.signals:
            try:
                undo.append(_on_signal(one, promote, flush))
            except (ValueError, OSError):  # in a thread other than the main one, or of the system
                untaken.append(one.name)
        if untaken:
            warned(
                f"{', '.join(untaken)} is not taken here and may end the program: enable capture "
                "in the main thread, or choose another signal"
            )
        return lambda: _call_all(undo)


class Watch:
    """Scalars of ended steps, each looked at once they all are there; no device is waited for.

    Args:
        triggers: What is looked for.
    """

    def __init__(self, triggers: Triggers) -> None:
        self._triggers = triggers
        self._unread: deque[tuple[str, dict[str, list[Any]]]] = deque()
        self._untold = {name for name, _, _ in triggers.bounds}
        self._steps = 0

    def add(self, step: str, scalars: Mapping[str, Sequence[Any]]) -> None:
        """Take over what was told of a step.

        Args:
            step: The step, in words.
            scalars: All values of each, as `settled` gave them; what is no number is left out.
        """
        told = {name: list(_numbers(values)) for name, values in scalars.items()}
        self._unread.append((step, told))
        self._steps += 1
        self._untold -= {name for name, values in told.items() if values}

    def untold(self) -> list[str]:
        """Scalars that a bound is on and that nobody told of so many steps; said once."""
        if self._steps < TOLD_WITHIN or not self._untold:
            return []
        found, self._untold = sorted(self._untold), set()
        return found

    def look(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Steps in order, and what each set off and why; up to one that is still under way."""
        while self._unread:
            step, scalars = self._unread[0]
            if not all(_is_there(one) for values in scalars.values() for one in values):
                return
            self._unread.popleft()
            found = {name: list(_read(values)) for name, values in scalars.items()}
            yield step, self._triggers.fired(found)

    def wait(self, timeout_s: float) -> None:
        """Wait until all is there, or the time is over; for the end of a program."""
        deadline = time.monotonic() + timeout_s
        held = [one for _, told in self._unread for values in told.values() for one in values]
        while not all(map(_is_there, held)) and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)


def _numbers(values: Iterable[Any]) -> Iterator[Any]:
    for one in values:
        if isinstance(one, tuple):
            yield from _numbers(one)
        elif isinstance(one, (int, float, DeviceScalar)):
            yield one


def _is_there(value: Any) -> bool:
    try:
        return not isinstance(value, DeviceScalar) or value.is_there()
    except RuntimeError:  # of a device that failed: it never will be
        return True


def _read(values: Iterable[Any]) -> Iterator[float]:
    for one in values:
        with contextlib.suppress(ValueError, RuntimeError, OverflowError):  # it is no one number
            yield float(one)


def _call_all(functions: Iterable[Callable[[], None]]) -> None:
    for one in functions:
        one()


def _on_exception(promote: Callable[[str], None]) -> Callable[[], None]:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            promote(f"the program ends with {reason_of(error)}")
        finally:
            before(kind, error, trace)

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return undo


def _on_signal(
    number: signal.Signals, promote: Callable[[str], None], flush: Callable[[], object]
) -> Callable[[], None]:
    before = signal.getsignal(number) or signal.SIG_DFL  # a handler of C cannot be called
    ends = before is signal.SIG_DFL and number.name not in _ASKING

    def write() -> None:
        try:
            promote(f"signal {number.name}")
            if ends:
                flush()
        finally:
            if ends:
                os.kill(os.getpid(), number)

    def handler(received: int, frame: FrameType | None) -> None:
        if ends:  # this thread alone may do so; a second signal ends the program at once
            signal.signal(number, signal.SIG_DFL)
        # The interrupted code may hold a lock that promoting takes: another thread can wait for it.
        threading.Thread(target=write).start()
        if callable(before):
            before(received, frame)

    def undo() -> None:
        if signal.getsignal(number) is handler:
            signal.signal(number, before)

    signal.signal(number, handler)
    return undo


def _signal(part: str) -> signal.Signals:
    name: Any = f"SIG{part.removeprefix(SIGNAL)}"
    if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
        raise _malformed(part)
    return signal.Signals[name]


def _malformed(part: str) -> SchemaError:
    return SchemaError(
        f"a trigger is {part!r}, expected {NON_FINITE}, {EXCEPTION}, a bound such as loss>5 or "
        f"{SIGNAL}USR1",
        hint="Separate several with commas.",
    )

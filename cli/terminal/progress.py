"""A progress bar on stderr, only on a terminal and only for work that takes a while."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PATIENCE_S = 0.5


class ProgressBar:
    """Shows how much of a count is done; call it with (done, total).

    Args:
        label: What is being done, one word or two.
        quiet: Whether nothing is shown at all.
    """

    def __init__(self, label: str, *, quiet: bool = False) -> None:
        self._label = label
        self._hidden = quiet or not sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        if self._hidden:
            return
        if self._bar is None:
            if time.monotonic() - self._started_s < _PATIENCE_S or done >= total:
                return
            self._start(total)
        assert self._bar is not None
        assert self._task is not None
        self._bar.update(self._task, completed=done, total=total)

    def _start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        self._bar = Progress(
            TextColumn(self._label, markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            Remaining(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._label, total=total)
        self._bar.start()

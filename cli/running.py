"""A command that is run: whether it can be, known beforehand, and how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from trajreplay.cli.sentinel import Sentinel

# Those that end a program unless it handles them, and that others send it: the last two are what
# schedulers warn a job with.
_FORWARDED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
NOT_FOUND, NOT_RUN = 127, 126  # as a shell says it


@dataclass(frozen=True)
class Ended:
    """How a command ended: with an exit code, or killed by a signal."""

    exit: int | None
    signal: int | None = None

    @property
    def code(self) -> int:
        """The exit code that a shell gives: 128 and the signal where it was killed."""
        return 128 + (self.signal or 0) if self.exit is None else self.exit


class NotRunnable(click.ClickException):
    """There is a file of the name of a program, and it is none that can be executed."""

    exit_code = NOT_RUN


class NotThere(NotRunnable):
    """There is no such program."""

    exit_code = NOT_FOUND


def check_runnable(name: str) -> None:
    """Refuse the name of a program that cannot be run, as a shell finds it.

    Raises:
        NotThere: It is not there.
        NotRunnable: It is a folder, or may not be executed.
    """
    if name and shutil.which(name):
        return
    with_folder = "/" in name
    folders = ["."] if with_folder else os.get_exec_path()
    there = [one for one in (Path(folder, name) for folder in folders) if name and one.exists()]
    if there and there[0].is_dir() and with_folder:
        raise NotRunnable(f"{name}: is a folder, expected a program")
    files = [one for one in there if not one.is_dir()]
    if files:
        raise NotRunnable(
            f"{files[0]}: may not be executed, expected a program; make it one with chmod +x, or "
            f"name what runs it, such as: python {name}"
        )
    where = "" if with_folder else " in any folder of PATH"
    raise NotThere(f"{name or repr(name)}: there is no such program{where}")


def run_command(command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run a command with more in its environment, and wait until it has ended.

    Signals that would end this program are passed on to it instead, each once: one that came to
    the whole process group has reached it already.
    """
    with _passing_on() as started:
        try:
            process = subprocess.Popen(command, env={**os.environ, **environment})
        except OSError as error:  # its interpreter is not there, or it is no program at all
            click.echo(f"Error: {command[0]}: {error.strerror}", err=True)
            return Ended(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN)
        started(process)
        code = process.wait()
    return Ended(None, -code) if code < 0 else Ended(code)


@contextmanager
def _passing_on() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Pass signals on to a process, from before it is there on.

    Yields:
        What is called with the process once it has started.
    """
    early: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        if not running:
            early.append(number)
        elif not sentinel.heard(number):
            running[0].send_signal(number)

    def started(process: subprocess.Popen[bytes]) -> None:
        running.append(process)
        for number in early:  # it may not have been there when the group got them
            process.send_signal(number)

    before = {one: signal.signal(one, forward) for one in _FORWARDED}
    try:
        sentinel = Sentinel(_FORWARDED)
        try:
            yield started
        finally:
            sentinel.close()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)

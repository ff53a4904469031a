"""Threads beside a training: they give way to it, and end with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable

_NICE = 19


def start(name: str, work: Callable[[], None]) -> threading.Thread:
    """Start a thread that runs when no other wants to, and is not waited for at the end.

    Args:
        name: Its name.
        work: What it does.
    """

    def run() -> None:
        with contextlib.suppress(OSError, AttributeError):  # where threads have no priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def leave_alone(thread: threading.Thread) -> None:
    """Have the process end without the destructors of native libraries, if a thread works on.

    They run once the interpreter has ended, and take from a thread that is in native code what it
    uses, which ends the process with an abort. With glibc the process leaves before them, with
    the status that it has; elsewhere nothing is changed.
    """
    if thread.is_alive():
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL(None)
            libc.on_exit(libc._exit, None)  # what is registered last is called first

"""A spool: a folder of this machine that captures go to first, and from there to the lake."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trajreplay.schema.canonical import MAX_BYTES, dump_signed, load_signed
from trajreplay.schema.errors import CaptureError, DatasetError
from trajreplay.schema.layout import DATA_ROOT, ENTRIES, TEMPORARY

if TYPE_CHECKING:
    from trajreplay.schema.identity import CaptureKey
    from trajreplay.schema.store import Store
    from trajreplay.writer.packing import Promoted

_AGAIN_S = 0.05
_EMPTY_FOR_S = 3600.0
_TARGET, _LOCK = "spool.json", "promote.lock"


def prepare(folder: str, lake: str) -> None:
    """Make a folder the spool of a lake, or see that it is.

    Raises:
        DatasetError: No spool can be made there.
        CaptureError: It is the spool of another lake, or a lake that is none.
    """
    from trajreplay.schema.lakefile import create_lake

    target = lake if "://" in lake else str(Path(lake).resolve())
    found = _names(folder)  # before it is asked for: another rank may be making it the spool
    if found - {TEMPORARY, _TARGET} and not is_spool(folder):
        raise CaptureError(
            f"{folder} is no spool and not empty",
            hint="Give TRAJREPLAY_CAPTURE_SPOOL a folder of its own, on a disk of this machine.",
            path=folder,
        )
    store = _as_spool(folder, target)
    create_lake(folder, exist_ok=True)
    if (before := _target(store, folder)) != target:
        raise CaptureError(
            f"{folder} is a spool of {before}, expected {target}",
            hint="Give each lake a spool of its own.",
            path=folder,
        )


def _names(folder: str) -> set[str]:
    """What is in a folder, if it is there."""
    return {one.name for one in Path(folder).iterdir()} if Path(folder).is_dir() else set()


def is_spool(folder: str) -> bool:
    """Whether a folder is a spool."""
    return (Path(folder) / _TARGET).is_file()


def target_of(folder: str) -> str:
    """The lake that a spool belongs to.

    Raises:
        CaptureError: It is no spool.
        DatasetError: The file that says so is damaged.
    """
    from trajreplay.schema.localstore import LocalStore

    if not is_spool(folder):
        raise CaptureError(
            f"{folder} is no spool: it has no {_TARGET}",
            hint="Name the folder that TRAJREPLAY_CAPTURE_SPOOL was set to.",
            path=folder,
        )
    return _target(LocalStore(folder), folder)


def _as_spool(folder: str, target: str) -> Store:
    from trajreplay.schema.localstore import LocalStore

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        store = LocalStore(folder)
        store.publish_if_absent(_TARGET, dump_signed({"lake": target}))
    except OSError as error:
        raise DatasetError(
            f"{folder} cannot be a spool: {error.strerror}",
            hint="Name a folder on a disk of this machine that can be written.",
            path=folder,
        ) from error
    return store


def _target(store: Store, folder: str) -> str:
    where = f"{folder}/{_TARGET}"
    target = load_signed(store.read(_TARGET, MAX_BYTES), where).get("lake")
    if not isinstance(target, str):
        raise DatasetError(f"{where}: lake is {target!r}, expected a path", path=where)
    return target


def waiting(folder: str) -> list[CaptureKey]:
    """The captures that are in a spool and may not be in its lake yet.

    Raises:
        CaptureError: It is no spool.
        DatasetError: Its manifest holds something else.
    """
    from trajreplay.schema.layout import key_of_entry
    from trajreplay.schema.localstore import LocalStore
    from trajreplay.writer.packing import spooled

    target_of(folder)
    return [key_of_entry(one) for one in spooled(LocalStore(folder))]


def promoted(
    folder: str, lake: str, *, wait_s: float, deadline: Callable[[], float] = lambda: math.inf
) -> Promoted:
    """Bring what a spool holds into its lake; one process at a time does so.

    Args:
        folder: The spool.
        lake: The lake.
        wait_s: How long to wait for another process that is at it.
        deadline: Tells when to leave the rest for later, by `time.monotonic`.

    Raises:
        CaptureError: Another process was at it for all that time, or the folder is no spool.
        TrajReplayError: The lake is refused.
        OSError: The lake or the spool cannot be written or read.
    """
    from trajreplay.schema.lakefile import open_lake
    from trajreplay.writer.packing import promote_captures

    target_of(folder)
    with _alone(folder, wait_s):
        found = promote_captures(
            open_lake(folder), open_lake(lake), stop=lambda: time.monotonic() > deadline()
        )
        for root in (ENTRIES, DATA_ROOT):
            _remove_empty(Path(folder) / root)
        return found


def _remove_empty(root: Path) -> None:
    """Remove folders that nothing came into or left for so long that nothing will come."""
    oldest = time.time() - _EMPTY_FOR_S
    for folder, _, files in os.walk(root, topdown=False):
        if not files and (empty := Path(folder)).stat().st_mtime < oldest:
            with contextlib.suppress(OSError):  # it is not empty
                empty.rmdir()


class BusyError(CaptureError):
    """Another process is promoting the same spool."""


@contextlib.contextmanager
def _alone(folder: str, wait_s: float) -> Iterator[None]:
    """Hold the lock of a spool, which a process that dies lets go of."""
    deadline = time.monotonic() + wait_s
    descriptor = os.open(
        f"{folder}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    try:
        while not _locked(descriptor):
            if time.monotonic() > deadline:
                raise BusyError(
                    f"{folder} is being promoted by another process",
                    hint="Wait until it is done, and try again if something is left.",
                    path=folder,
                )
            time.sleep(_AGAIN_S)
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

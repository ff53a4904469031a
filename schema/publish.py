"""Giving a finished file its name only if the name is free, on every kind of file system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

from trajreplay.schema.claim import place_under_claim

_UNSUPPORTED = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def publish(temporary: str, target: str) -> bool:
    """Give a finished, synced file its final name unless that is taken, and make it durable.

    Tries a hard link, then a rename that replaces nothing, then an exclusive claim beside the
    name: what the file system supports.

    Args:
        temporary: The file, on the same file system. It may be gone afterwards.
        target: Its final name.

    Returns:
        Whether the name is now this file's.
    """
    created = _link(temporary, target)
    if created is None:
        created = _rename(temporary, target)
    if created is None:
        created = place_under_claim(temporary, target)
    if created:
        sync_folder(os.path.dirname(target))
    return created


def _link(temporary: str, target: str) -> bool | None:
    try:
        os.link(temporary, target)
    except OSError as error:
        # A network file system may have linked and lost the reply: two names tell.
        if os.stat(temporary).st_nlink == 2:
            return True
        if isinstance(error, FileExistsError):
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        return None
    return True


def _rename(temporary: str, target: str) -> bool | None:
    """Linux's renameat2, which Python does not offer."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return None
    names = os.fsencode(temporary), _AT_FDCWD, os.fsencode(target)
    if function(_AT_FDCWD, *names, ctypes.c_uint(_RENAME_NOREPLACE)) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EEXIST:
        return False
    if code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code), target)
    return None


def write_synced(path: str, data: bytes) -> None:
    """Write a new file and make its content durable."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_if_there(path: str) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)

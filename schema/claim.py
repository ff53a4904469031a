"""Giving a file a free name where the file system has neither links nor a rename that keeps.

A claim is a file beside the name, created only if absent, and held for one look and one rename. One
that is older belongs to a writer that is dead, or so slow that it is held for dead: whoever creates
the file that names this very claim, by inode and time, takes its place. Of several that try, one
succeeds; the dead claim goes last but one, so that nobody finds its successor free before.
"""

from __future__ import annotations

import contextlib
import os
import time

CLAIM_SUFFIX = ".claim"
CLAIM_GRACE_S = 30.0
_POLL_S = 0.02


def place_under_claim(temporary: str, target: str) -> bool:
    """Rename a file to a name that nobody has, while holding the claim to it.

    Returns:
        Whether the name is now this file's.
    """
    while True:
        held = _hold(temporary, target)
        if held and _is_held(target, held[-1]):
            break
        if os.path.lexists(target):
            return False
        time.sleep(_POLL_S)
    try:
        if os.path.lexists(target):
            return False
        os.rename(temporary, target)
        return True
    finally:
        for path in held:
            _remove(path)


def _hold(temporary: str, target: str) -> list[str]:
    """The files by which this writer holds the name from now on, nothing while another does."""
    held = [target + CLAIM_SUFFIX]
    if _create(held[0]):
        return held
    while (found := _named(target, held[-1])) and _age_s(held[-1], temporary) > CLAIM_GRACE_S:
        held.append(found)
        if _create(found):
            if _named(target, held[-2]) == found:
                return held
            _remove(found)  # the dead claim was taken over and given back meanwhile
            break
    return []


def _named(target: str, claim: str) -> str | None:
    """The name of what takes over this very claim; None if it is gone."""
    try:
        found = os.stat(claim)
    except FileNotFoundError:
        return None
    return f"{target}.{found.st_ino:x}-{found.st_mtime_ns:x}{CLAIM_SUFFIX}"


def _is_held(target: str, claim: str) -> bool:
    """Whether a claim of ours is there and was not taken over, for ours being old."""
    found = _named(target, claim)
    return found is not None and not os.path.lexists(found)


def _create(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        return False
    return True


def _age_s(claim: str, temporary: str) -> float:
    """Age by the clock of the file system, which touching a file of ours tells; 0 if it is gone."""
    os.utime(temporary)
    try:
        return os.stat(temporary).st_mtime - os.stat(claim).st_mtime
    except FileNotFoundError:
        return 0.0


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)

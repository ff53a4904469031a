"""Why something was given up, in words that a lake may keep, and the warning of it."""

from __future__ import annotations

import contextlib
import re
import warnings

from trajreplay.schema.errors import TrajReplayError

_MOST_CHARACTERS = 4096
_MOST_KINDS = 30  # of problems that are warned of
# What differs between messages of one problem: what they quote, numbers, hashes, folders of tests.
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|[\w./-]*\d[\w./-]*")


def reason_of(error: BaseException) -> str:
    """What a lake keeps of an error: our own message, the system's word, or only its type.

    The text of any other error is the program's own, and may quote a prompt, a path or a secret.

    >>> reason_of(KeyError("a prompt"))
    'KeyError'
    >>> reason_of(FileNotFoundError(2, "No such file or directory", "/home/someone"))
    'FileNotFoundError: No such file or directory'
    """
    name = type(error).__name__
    if isinstance(error, TrajReplayError):
        return error.message[:_MOST_CHARACTERS]
    if isinstance(error, OSError) and error.strerror:
        return f"{name}: {error.strerror}"
    return name


def kind_of(error: BaseException) -> str:
    """What errors of one problem have in common, whatever they are about; it is told once.

    >>> kind_of(ValueError("row 3 of 'a'")) == kind_of(ValueError("row 17 of 'b'"))
    True
    """
    name = type(error).__name__
    root: BaseException | None = error
    while root is not None:
        if isinstance(root, OSError):  # the disk, whatever was to be written
            return f"OSError {root.errno}"
        root = root.__cause__
    text = error.message if isinstance(error, TrajReplayError) else str(error)
    return f"{name} {_PARTICULAR.sub('#', text)[:200]}"


class CaptureWarning(UserWarning):
    """Something of a training could not be captured; the training itself goes on."""


class WarnedOnce:
    """Warns once for each kind of problem, and of no more kinds than a person reads."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def __call__(self, kind: str, message: str) -> None:
        """Warn, unless it was done for this kind.

        Args:
            kind: What messages of one problem have in common.
            message: What went wrong.
        """
        if kind in self._kinds or len(self._kinds) > _MOST_KINDS:
            return
        self._kinds.add(kind)
        last = len(self._kinds) > _MOST_KINDS
        warn(f"{message}; further problems are not told" if last else message)


def warn(message: str) -> None:
    """Warn; where warnings are errors, nothing is raised either."""
    with contextlib.suppress(CaptureWarning):
        warnings.warn(f"trajreplay: {message}", CaptureWarning, stacklevel=4)

"""Why something was given up, in words that a lake may keep."""

from __future__ import annotations

import re

from trajreplay.schema.errors import TrajReplayError

_MOST_CHARACTERS = 4096
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

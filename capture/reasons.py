"""Why something was given up, in words that a lake may keep."""

from __future__ import annotations

from trajreplay.schema.errors import TrajReplayError


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
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{name}: {error.strerror}"
    return name

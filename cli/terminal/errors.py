"""How errors look on the terminal, and which exit code each stands for."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import sys
import traceback

import click

from trajreplay.cli.terminal.sink import SinkError
from trajreplay.cli.terminal.text import printable

DIFFERS = 1
USAGE = 2
REFUSED = 3
INTERRUPTED = 130
_OF_LAKE = re.compile(r"\btrajreplay (?:info|inspect|validate|gate|sql|replay|mismatch)\b")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def report_error(error: Exception, *, verbose: bool, lake: str | None = None) -> int:
    """Say on stderr what went wrong and what to do, and return the exit code.

    Args:
        error: Whatever ended the command.
        verbose: Whether an unexpected error shows where it came from.
        lake: The lake that the command line named, which commands in a hint need as well.
    """
    if _was_interrupted(error):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        error.show(file=sys.stderr)
        return error.exit_code
    if isinstance(error, SinkError) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    # Imported only now: a wrong option must not wait for the libraries behind the schema.
    from trajreplay.schema import QueryError, TrajReplayError

    if isinstance(error, TrajReplayError):
        _say(error.message, with_lake(error.hint, lake))
        return USAGE if isinstance(error, QueryError) else REFUSED
    if isinstance(error, OSError) and error.strerror:
        hint = "Make room there, or write to another place." if error.errno in _FULL else ""
        _say(f"{error.filename or 'input or output'}: {error.strerror}", hint)
        return REFUSED
    if isinstance(error, MemoryError):
        _say("out of memory", "Select less, or give replay a smaller --memory.")
        return REFUSED
    if verbose:
        click.echo(printable("".join(traceback.format_exception(error)), keep="\n"), err=True)
    _say(
        f"unexpected {type(error).__name__}: {error}",
        "This is a mistake in trajreplay, not in your data: please report the command and what it\n"
        "printed with -v, which adds where the error came from.",
    )
    return REFUSED


def with_lake(hint: str, lake: str | None) -> str:
    """A hint whose commands name the lake that was named, unless the environment does.

    >>> with_lake("To list the runs: trajreplay info", "runs/a")
    'To list the runs: trajreplay info --lake runs/a'
    """
    if not hint or lake is None or os.environ.get("TRAJREPLAY_LAKE") == lake:
        return hint
    return _OF_LAKE.sub(lambda found: f"{found[0]} --lake {shlex.quote(lake)}", hint)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is behind it; a library that was being loaded makes it another error."""
    while error is not None and not isinstance(error, click.Abort | KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _say(message: str, hint: str = "") -> None:
    click.echo(f"Error: {printable(message, keep=chr(10))}", err=True)
    if hint:
        click.echo(f"\n{printable(hint, keep=chr(10))}", err=True)


def silence_broken_pipe() -> None:
    """Send what is still buffered to nowhere, so that closing stdout cannot fail once more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""Where bytes of a result go: stdout, or a file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click


class SinkError(Exception):
    """Writing failed, with the OSError as cause: not to be taken for a failure to read rows."""


@contextlib.contextmanager
def _writing(path: Path | None) -> Iterator[None]:
    """Make what goes wrong with a file a SinkError whose cause names it."""
    try:
        yield
    except OSError as error:
        if path is not None:
            error = OSError(error.errno, error.strerror, str(path))
        raise SinkError(str(error)) from error


class Sink:
    """A stream for bytes whose failures are SinkError.

    Args:
        stream: Where the bytes go.
        path: What the stream is called in an error; None for stdout.
    """

    closed = False

    def __init__(self, stream: IO[bytes], path: Path | None = None) -> None:
        self._stream = stream
        self._path = path

    def write(self, data: bytes) -> int:
        """Write bytes."""
        with _writing(self._path):
            return self._stream.write(data)

    def flush(self) -> None:
        """Pass on what is buffered."""
        with _writing(self._path):
            self._stream.flush()

    def tell(self) -> int:
        """How many bytes were written."""
        with _writing(self._path):
            return self._stream.tell()


def check_place(path: Path, option: str = "-o") -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold.

    Args:
        path: The file.
        option: What names it on the command line.

    Raises:
        click.UsageError: Its folder is not there, or `opened` refuses what it is.
        SinkError: Its folder cannot be written.
    """
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(
            f"the folder {str(path.parent)!r} does not exist", param_hint=f"'{option}'"
        )
    _refuse(path.absolute(), option)
    aside = _aside(path)
    aside.close()
    Path(aside.name).unlink(missing_ok=True)


@contextlib.contextmanager
def opened(path: Path | None, option: str = "-o") -> Iterator[Sink]:
    """Open a file to write, or stdout; a file appears under its name only when it is complete.

    Args:
        path: The file; None for stdout.
        option: What names it on the command line.

    Raises:
        click.UsageError: What is there is no plain file, or belongs to a lake.
        SinkError: It cannot be written.
    """
    if path is None:
        sink = Sink(sys.stdout.buffer)
        yield sink
        sink.flush()
        return
    target = path.absolute()
    _refuse(target, option)
    file = _aside(path)
    aside = Path(file.name)
    try:
        yield Sink(file, path)
        with _writing(path):
            file.close()
            mask = os.umask(0)
            os.umask(mask)
            aside.chmod(0o666 & ~mask)  # mkstemp's own mode is for secrets
            aside.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # closing writes what is buffered
            file.close()
        aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def unnamed() -> Iterator[tuple[IO[bytes], Sink]]:
    """Open a temporary file without a name, and what to write to it with.

    Raises:
        SinkError: There is no place for it, or it cannot be written.
    """
    folder = Path(tempfile.gettempdir())
    with _writing(folder):
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, and not heard of any more
    try:
        yield file, Sink(file, folder)
    finally:
        with contextlib.suppress(OSError):
            file.close()


def _aside(path: Path) -> IO[bytes]:
    """A new file beside another, with a name of its own.

    Raises:
        SinkError: The folder cannot be written.
    """
    target = path.absolute()
    with _writing(path):
        return tempfile.NamedTemporaryFile(
            prefix=f".{target.name}.", dir=target.parent, delete=False
        )


def _refuse(target: Path, option: str) -> None:
    """Refuse to replace what is no plain file, or anything of a lake."""
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise click.UsageError(
            f"{option} {str(target)!r} is a link, folder or device, expected a regular file or a "
            "new one"
        )
    if any((folder / "lake.json").is_file() for folder in target.parents):
        raise click.UsageError(
            f"{option} {str(target)!r} is inside a lake, which only captures write to; expected "
            "elsewhere"
        )

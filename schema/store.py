"""What a lake needs of the place that it lies in: read, list, and publish if absent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from trajreplay.schema.errors import DatasetError

_NO_NAMES = frozenset(("", ".", ".."))


class Listed(NamedTuple):
    """One file of a listing: its path relative to the lake, size in bytes, and change time in s."""

    path: str
    size_bytes: int
    changed_s: float


class Store(Protocol):
    """A folder or a prefix of a bucket; paths are relative to it, with `/` between components.

    Every method refuses a path that leaves the lake, and raises `DatasetError` for what cannot be
    read.
    """

    @property
    def folder(self) -> Path | None:
        """The folder that it is, if it is one."""

    def open(self, path: str) -> int:
        """Open a file for reading and return a descriptor, which the caller closes."""

    def read(self, path: str, limit_bytes: int) -> bytes:
        """The bytes of a file that has no more than `limit_bytes`."""

    def exists(self, path: str) -> bool:
        """Whether something of that name is there."""

    def list(self, prefix: str) -> Iterator[Listed]:
        """Every file below a folder, in no particular order."""

    def temporary(self) -> str:
        """An absolute path for an unfinished file."""

    def place(self, temporary: str, path: str) -> None:
        """Give a finished, synced file its final name."""

    def publish_if_absent(self, path: str, data: bytes) -> bool:
        """Create a file with this content, whole and durable, unless the name is taken."""

    def remove(self, path: str) -> None:
        """Remove a file that no entry names; one that is gone already is no error."""

    def sweep(self, older_than_s: float) -> int:
        """Remove unfinished files that no writer has touched for so long; returns how many."""


def check_relative(path: str, where: object) -> str:
    """Return a path that stays inside the lake.

    Raises:
        DatasetError: It does not, or is not plain.
    """
    if not _NO_NAMES.isdisjoint(path.split("/")) or "\0" in path:
        raise DatasetError(
            f"{path!r} leaves the lake {where}, expected a plain relative path",
            hint="The lake was edited by hand or comes from someone else: do not trust it.",
            path=path,
        )
    return path


def now_us() -> int:
    """Microseconds since 1970, UTC."""
    return time.time_ns() // 1000

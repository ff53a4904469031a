"""A folder that came from anywhere: only regular files inside it are read, up to a size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from trajreplay.schema.errors import DatasetError
from trajreplay.schema.localstore import LocalStore

MAX_METADATA_BYTES = 64 << 20
_READ: ContextVar[dict[Path, None] | None] = ContextVar("read", default=None)


class Folder:
    """A folder of another tool. Nothing outside of it is opened, and no link is followed.

    Args:
        root: The folder.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self._store = LocalStore(root)

    def __str__(self) -> str:
        return str(self.root)

    def where(self, path: str) -> str:
        """A file as messages name it."""
        return f"{self.root}/{path}" if path else str(self.root)

    def read(self, path: str, limit_bytes: int = MAX_METADATA_BYTES) -> bytes:
        """The bytes of a regular file.

        Raises:
            DatasetError: It is missing, a link, no regular file, or larger than `limit_bytes`.
        """
        note_read(self.root / path)
        try:
            return self._store.read(path, limit_bytes)
        except DatasetError as error:
            raise DatasetError(
                error.message, hint="Get the files again from where they were written.", path=path
            ) from error

    def holds(self, path: str) -> bool:
        """Whether something of that name is there."""
        return self._store.exists(path)

    def names(self, path: str = "") -> list[str]:
        """The names in a folder, in order.

        Raises:
            DatasetError: It is no folder, or cannot be listed.
        """
        inside = self._store.absolute(f"{path}/x").removesuffix("/x") if path else self.root
        try:
            return sorted(os.listdir(inside))  # noqa: PTH208 - names are wanted, not paths
        except OSError as error:
            raise DatasetError(
                f"{self.where(path)} cannot be listed: {error.strerror}", path=path
            ) from error


@contextmanager
def noting_reads() -> Iterator[dict[Path, None]]:
    """Collect the files that are read for what they hold in a block, in their order."""
    files: dict[Path, None] = {}
    token = _READ.set(files)
    try:
        yield files
    finally:
        _READ.reset(token)


def note_read(path: Path) -> None:
    """Note that a file is read for what it holds, and not just to tell what it is."""
    files = _READ.get()
    if files is not None:
        files[path] = None


def is_folder(path: Path) -> bool:
    """Whether a path is a folder itself and no link to one; what cannot be looked at is none."""
    try:
        return path.is_dir() and not path.is_symlink()
    except OSError:
        return False

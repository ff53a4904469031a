"""A lake in a folder: only regular files inside it are opened, and no link is followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from trajreplay.schema.errors import DatasetError
from trajreplay.schema.layout import TEMPORARY
from trajreplay.schema.publish import publish, remove_if_there, sync_folder, write_synced
from trajreplay.schema.store import Listed, check_relative

_OF_THE_FILE = "Restore it from a copy of the lake; what else is affected: trajreplay validate"
_TOO_MANY_OPEN = (
    "The file is not at fault: close some files, or allow the process more of them, as with "
    "ulimit -n 4096."
)
# What stops a read and is no fault of the lake.
_OF_THE_PROCESS = {
    errno.EMFILE: _TOO_MANY_OPEN,
    errno.ENFILE: "The file is not at fault: the machine has no more files to open; close some.",
    errno.EACCES: "Read it as a user who may, or change who may read the lake.",
}


class LocalStore:
    """A lake in a folder. The root is resolved once; no link below it is ever followed."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).resolve()
        self._prefix = f"{self.root}/"
        self._real_folders: set[str] = set()

    def __str__(self) -> str:
        return str(self.root)

    @property
    def folder(self) -> Path:
        """The folder, with links resolved."""
        return self.root

    def absolute(self, path: str) -> str:
        """The checked absolute path of a file or folder of the lake.

        Raises:
            DatasetError: The path leaves the lake, or a component of it is a link.
        """
        self._check_folders(check_relative(path, self.root).rpartition("/")[0])
        return f"{self._prefix}{path}"

    def _check_folders(self, folder: str) -> None:
        """Refuse a folder that is none, or is in none; those above it are looked at first."""
        if folder and folder not in self._real_folders:
            self._check_folders(folder.rpartition("/")[0])
            self._check_folder(folder)

    def _check_folder(self, folder: str) -> None:
        try:
            mode = os.lstat(f"{self._prefix}{folder}").st_mode
        except OSError:
            return  # a missing folder shows when the file is opened
        if not stat.S_ISDIR(mode):
            raise DatasetError(
                f"{folder} in {self.root} is a {_kind(mode)}, expected a folder",
                hint="Replace it by the folder itself: links are not followed.",
                path=folder,
            )
        self._real_folders.add(folder)

    def open(self, path: str) -> int:
        """Open a regular file for reading and return its descriptor.

        Raises:
            DatasetError: It is missing, a link, or no regular file.
        """
        absolute = self.absolute(path)
        try:
            descriptor = os.open(
                absolute, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError as error:
            raise self._unreadable(path, error) from error
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            os.close(descriptor)
            raise DatasetError(
                f"{path} in {self.root} is a {_kind(mode)}, expected a regular file", path=path
            )
        return descriptor

    def _unreadable(self, path: str, error: OSError) -> DatasetError:
        found = {errno.ENOENT: "is missing", errno.ELOOP: "is a link, expected a regular file"}
        reason = found.get(error.errno or 0, f"cannot be read: {error.strerror}")
        hint = _OF_THE_PROCESS.get(error.errno or 0, _OF_THE_FILE)
        return DatasetError(f"{path} in {self.root} {reason}", hint=hint, path=path)

    def read(self, path: str, limit_bytes: int) -> bytes:
        """The bytes of a file.

        Raises:
            DatasetError: It cannot be opened or read, is larger than `limit_bytes`, or shrinks
                meanwhile.
        """
        descriptor = self.open(path)
        try:
            size = os.fstat(descriptor).st_size
            if size > limit_bytes:
                raise DatasetError(
                    f"{path} in {self.root} has {size} bytes, expected at most {limit_bytes}",
                    path=path,
                )
            return self._content(path, descriptor, size)
        finally:
            os.close(descriptor)

    def _content(self, path: str, descriptor: int, size: int) -> bytes:
        """The first bytes of an open file: Linux reads less than 2 GiB at a time."""
        pieces: list[bytes] = []
        at = 0
        while at < size:
            try:
                piece = os.pread(descriptor, size - at, at)
            except OSError as error:
                raise self._unreadable(path, error) from error
            if not piece:
                raise DatasetError(
                    f"{path} in {self.root} changed while it was read: it has {at} bytes, "
                    f"expected {size}",
                    hint="Read it again once nothing writes to it.",
                    path=path,
                )
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    def exists(self, path: str) -> bool:
        """Whether something of that name is there."""
        return os.path.lexists(self.absolute(path))

    def list(self, prefix: str) -> Iterator[Listed]:
        """Every regular file below a folder, in no particular order.

        Raises:
            DatasetError: Something below it is a link or a special file.
        """
        yield from self._walk(prefix, self.absolute(prefix + "/x").removesuffix("/x"))

    def _walk(self, prefix: str, folder: str) -> Iterator[Listed]:
        """The files below a checked folder."""
        try:
            with os.scandir(folder) as found:
                children = list(found)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unreadable(prefix, error) from error
        for child in children:
            path = f"{prefix}/{child.name}"
            if child.is_dir(follow_symlinks=False):
                yield from self._walk(path, child.path)
            elif child.is_file(follow_symlinks=False):
                try:
                    status = child.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield Listed(path, status.st_size, status.st_mtime)
            else:
                raise DatasetError(
                    f"{path} in {self.root} is a link or special file, expected regular files only",
                    path=path,
                )

    def temporary(self) -> str:
        """A path for an unfinished file, on the file system of the lake."""
        self._make_folders(TEMPORARY)
        return self.absolute(f"{TEMPORARY}/{uuid.uuid4()}")

    def place(self, temporary: str, path: str) -> None:
        """Move a finished, synced file to its final name and make the name durable."""
        target = self.absolute(path)
        self._make_folders(os.path.dirname(path))
        os.rename(temporary, target)
        sync_folder(os.path.dirname(target))

    def publish_if_absent(self, path: str, data: bytes) -> bool:
        """Create a file with this content, whole and durable, unless the name is taken.

        Returns:
            Whether this call created it.
        """
        target = self.absolute(path)
        self._make_folders(os.path.dirname(path))
        temporary = self.temporary()
        try:
            write_synced(temporary, data)
            return publish(temporary, target)
        finally:
            remove_if_there(temporary)

    def _make_folders(self, folder: str) -> None:
        self._make_folder(f"{self._prefix}{folder}")

    def _make_folder(self, absolute: str) -> None:
        """Make a folder durable, after those above it, unless it is there."""
        if os.path.isdir(absolute):
            return
        above = os.path.dirname(absolute)
        self._make_folder(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(absolute)
        sync_folder(above)

    def remove(self, path: str) -> None:
        """Remove a file that no entry names; one that is gone already is no error."""
        remove_if_there(self.absolute(path))

    def sweep(self, older_than_s: float) -> int:
        """Remove unfinished files that no writer has touched for so long; returns how many.

        Ages are told by the clock of the file system, which may differ from this machine's.
        """
        probe = self.temporary()
        write_synced(probe, b"")
        now = os.stat(probe).st_mtime
        os.unlink(probe)
        removed = 0
        for one in self.list(TEMPORARY):
            if now - one.changed_s > older_than_s:
                remove_if_there(self.absolute(one.path))
                removed += 1
        return removed


def _kind(mode: int) -> str:
    names = {
        stat.S_IFLNK: "link",
        stat.S_IFDIR: "folder",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "device",
        stat.S_IFBLK: "device",
        stat.S_IFREG: "regular file",
    }
    return names.get(stat.S_IFMT(mode), "special file")

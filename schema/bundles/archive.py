"""The single-file form of a folder, `.tar.zst`: packed, and unpacked without trusting it."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from trajreplay.schema.errors import DatasetError
from trajreplay.schema.layout import LAKE_FILE
from trajreplay.schema.publish import publish

SUFFIX = ".tar.zst"
_MAX_FACTOR = 64  # float32 values shrink less than tenfold, masks and JSON less than this
_MAX_SMALL_BYTES = 64 << 20
_MAX_MEMBERS = 1_000_000
_FILE_BYTES = 4096  # that a disk keeps of each, however short
_MAX_DEPTH = 64
# What may lie between two members: padding, a long name twice, and what tarfile reads ahead.
_HEADER_BYTES = 64 << 10
_MAX_ATTRIBUTES = 64


def is_archive(path: Path) -> bool:
    """Whether a path is a file of this form, by its name."""
    return path.name.endswith(SUFFIX) and path.is_file()


def pack(folder: Path, archive: Path) -> None:
    """Write a folder as one file, whole or not at all; the same folder gives the same bytes.

    Args:
        folder: What is in it is packed, without the folder itself.
        archive: The file.

    Raises:
        DatasetError: The file is there, or cannot be written.
    """
    if archive.exists():
        raise DatasetError(f"{archive} is there already", hint="Choose another name.")
    aside = archive.with_name(f".{archive.name[:200]}.tmp-{os.getpid()}")
    try:
        with (
            pa.OSFile(str(aside), "wb") as file,
            pa.CompressedOutputStream(file, "zstd") as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for path in sorted(folder.rglob("*")):
                name = path.relative_to(folder).as_posix()
                tar.add(path, name, recursive=False, filter=_anonymous)
        if not publish(str(aside.absolute()), str(archive.absolute())):
            raise DatasetError(f"{archive} is there already", hint="Choose another name.")
    except OSError as error:
        raise DatasetError(f"{archive} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def written_to(path: Path, *, new: bool = False) -> Iterator[Path]:
    """A folder to write into: the one at a path, or one that becomes the archive of that name.

    Args:
        path: The folder or archive.
        new: Whether the folder must not be there, and gets its name once the block is left.

    Raises:
        DatasetError: The folder cannot be made, something is there that must not, or it is inside a
            lake.
    """
    is_packed = path.name.endswith(SUFFIX)
    if (new or is_packed) and path.exists():
        raise DatasetError(f"{path} is there already", hint="Choose another name.")
    place = path.resolve()
    if any((folder / LAKE_FILE).is_file() for folder in (place, *place.parents)):
        raise DatasetError(
            f"{path} is inside a lake, which only captures write to",
            hint="Choose a place outside of every lake.",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_packed:
            with tempfile.TemporaryDirectory(prefix="trajreplay-files-") as folder:
                yield Path(folder)
                pack(Path(folder), path)
        elif new:
            with tempfile.TemporaryDirectory(prefix=".export-", dir=path.parent) as folder:
                yield Path(folder) / "new"
                (Path(folder) / "new").rename(path)
        else:
            path.mkdir(exist_ok=True)
            yield path
    except OSError as error:
        raise DatasetError(
            f"{path} cannot be written: {error.strerror or error}",
            hint="Choose a folder with room that can be written.",
        ) from error


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """A path itself, or the folder that an archive unpacks to.

    Raises:
        DatasetError: The archive is broken or unsafe.
    """
    if not is_archive(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="trajreplay-files-") as folder:
        inside = Path(folder).resolve()
        unpack(path, inside)
        yield inside


def unpack(archive: Path, folder: Path) -> None:
    """Unpack into an empty folder: only plain files and folders inside it, up to a size.

    Raises:
        DatasetError: It is none, holds anything else, or unpacks to far more than such files do.
    """
    limit = max(_MAX_SMALL_BYTES, _MAX_FACTOR * archive.stat().st_size)
    try:
        with (
            pa.OSFile(str(archive), "rb") as file,
            pa.CompressedInputStream(file, "zstd") as packed,
            tarfile.open(fileobj=(bounded := _Bounded(packed)), mode="r|") as tar,
        ):
            for number, member in enumerate(tar):
                limit -= member.size + _FILE_BYTES
                if member.size < 0 or limit < 0 or number > _MAX_MEMBERS:
                    raise _odd(archive, "unpacks to far more than it is")
                if len(member.pax_headers) > _MAX_ATTRIBUTES:
                    raise _odd(archive, f"holds {member.name[:80]!r} with too many attributes")
                bounded.left = member.size + _HEADER_BYTES
                _unpack_member(tar, member, archive, folder)
                tar.members.clear()  # type: ignore[attr-defined]  # each keeps its attributes
    except (tarfile.TarError, OSError, EOFError, ValueError, RecursionError) as error:
        raise _odd(archive, f"is no {SUFFIX} file that is whole: {error}") from error


class _Bounded(io.BufferedIOBase):
    """A stream that ends in an error once what it may give is taken.

    tarfile reads headers of any size into memory before it yields a member.
    """

    def __init__(self, stream: pa.NativeFile) -> None:
        self._stream = stream
        self.left = _HEADER_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        data: bytes = self._stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"more than {_HEADER_BYTES:,} bytes of headers before a member")
        return data


def _unpack_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, archive: Path, folder: Path
) -> None:
    parts = [one for one in member.name.split("/") if one != "."]  # as `tar -cf - .` names them
    if member.name.startswith("/") or any(one in ("", "..") for one in parts):
        raise _odd(archive, f"holds {member.name[:80]!r}, which leaves its folder")
    if len(parts) > _MAX_DEPTH:
        raise _odd(archive, f"holds {member.name[:80]!r}, more than {_MAX_DEPTH} folders deep")
    target = folder.joinpath(*parts)
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise _odd(archive, f"holds {member.name[:80]!r}, which is no plain file")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        out = target.open("xb")
    except FileExistsError as error:
        raise _odd(archive, f"holds {member.name[:80]!r} twice") from error
    with out:
        shutil.copyfileobj(content, out)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Who packed it, and when, is nobody's business."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def _odd(archive: Path, what: str) -> DatasetError:
    return DatasetError(
        f"{archive} {what}", hint="Nothing of it is used. Have it sent again.", path=str(archive)
    )

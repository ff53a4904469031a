"""A lake in an object store: objects are put whole, and the commit is a conditional put."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from trajreplay.schema.errors import DatasetError
from trajreplay.schema.layout import TEMPORARY
from trajreplay.schema.publish import remove_if_there
from trajreplay.schema.store import Listed, check_relative

_Store = Any  # obstore's stores share no public base class


class ObjectStore:
    """A lake under a prefix of a bucket, with the methods of `LocalStore`.

    Objects appear whole or not at all, so a data file is put under its final name and only the
    entry needs care: it is put on condition that the name is free.

    Args:
        url: Such as `s3://bucket/prefix`; credentials and endpoint come from the environment, as
            the cloud's own tools take them.

    Raises:
        DatasetError: The scheme is unknown or the configuration incomplete.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._proven = False
        try:
            self._store: _Store = obstore.store.from_url(self.url)
        except (BaseError, ValueError, TypeError) as error:
            raise DatasetError(
                f"{url}: no object store can be reached by this address: {_line(error)}",
                hint="Give s3://bucket/prefix, gs://... or az://..., with credentials in the "
                "environment.",
            ) from error

    def __str__(self) -> str:
        return self.url

    @property
    def folder(self) -> None:
        """It is none."""
        return

    def open(self, path: str) -> int:
        """Fetch an object and return a descriptor of a nameless local copy.

        Raises:
            DatasetError: It is missing or cannot be fetched.
        """
        with self._naming(path):
            chunks = obstore.get(self._store, check_relative(path, self.url)).stream()
            with tempfile.TemporaryFile() as copy:
                for chunk in chunks:
                    copy.write(chunk)
                copy.flush()
                descriptor = os.dup(copy.fileno())
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def read(self, path: str, limit_bytes: int) -> bytes:
        """The bytes of an object.

        Raises:
            DatasetError: It is missing, or larger than `limit_bytes`.
        """
        with self._naming(path):
            found = obstore.get(self._store, check_relative(path, self.url))
            size = int(found.meta["size"])
            if size > limit_bytes:
                raise DatasetError(
                    f"{path} in {self.url} has {size} bytes, expected at most {limit_bytes}",
                    path=path,
                )
            return bytes(found.bytes())

    def exists(self, path: str) -> bool:
        """Whether there is an object of that name."""
        with self._naming(path):
            try:
                obstore.head(self._store, check_relative(path, self.url))
            except FileNotFoundError:
                return False
        return True

    def list(self, prefix: str) -> Iterator[Listed]:
        """Every object below a prefix."""
        with self._naming(prefix):
            for page in obstore.list(self._store, prefix=check_relative(prefix, self.url)):
                for one in page:
                    changed = one["last_modified"].timestamp()
                    yield Listed(str(one["path"]), int(one["size"]), changed)

    def temporary(self) -> str:
        """A local path for an unfinished file."""
        return os.path.join(tempfile.gettempdir(), f"trajreplay-{uuid.uuid4()}")

    def place(self, temporary: str, path: str) -> None:
        """Put a finished file under its final name and remove the local one."""
        with self._naming(path), open(temporary, "rb") as file:
            obstore.put(self._store, check_relative(path, self.url), file)
        remove_if_there(temporary)

    def publish_if_absent(self, path: str, data: bytes) -> bool:
        """Create an object with this content, unless the name is taken.

        Returns:
            Whether this call created it.

        Raises:
            DatasetError: The store ignores the condition, or cannot be reached.
        """
        self._prove_conditions()
        return self._create(path, data)

    def remove(self, path: str) -> None:
        """Remove an object that nothing names."""
        with self._naming(path):
            obstore.delete(self._store, check_relative(path, self.url))

    def sweep(self, older_than_s: float) -> int:
        """Nothing to sweep: an object that is not finished is not there."""
        return 0

    def _create(self, path: str, data: bytes) -> bool:
        try:
            with self._naming(path):
                obstore.put(self._store, check_relative(path, self.url), data, mode="create")
        except AlreadyExistsError:
            # The client repeats a put whose reply was lost, and then meets its own object.
            return self.read(path, len(data) + 1) == data if self._same_size(path, data) else False
        return True

    def _same_size(self, path: str, data: bytes) -> bool:
        with self._naming(path):
            return int(obstore.head(self._store, path)["size"]) == len(data)

    def _prove_conditions(self) -> None:
        """Create one probe twice: a store that lets the second through would lose commits."""
        if self._proven:
            return
        probe = f"{TEMPORARY}/probe-{uuid.uuid4()}"
        if not self._create(probe, b"1") or self._create(probe, b"2"):
            raise DatasetError(
                f"{self.url}: the object store ignores `If-None-Match: *`, so two writers could "
                "commit under one name",
                hint="Use a store with conditional writes, or capture to a folder.",
            )
        self.remove(probe)
        self._proven = True

    def _naming(self, path: str) -> _Naming:
        return _Naming(self.url, path)


class _Naming:
    """Turns a client's errors into ours, with the object named."""

    def __init__(self, url: str, path: str) -> None:
        self._url, self._path = url, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise DatasetError(
                f"{self._path} in {self._url} is missing",
                hint="Restore it from a copy of the lake; what else is affected: "
                "trajreplay validate",
                path=self._path,
            ) from error
        if isinstance(error, BaseError) and not isinstance(error, AlreadyExistsError):
            raise DatasetError(
                f"{self._path} in {self._url} cannot be reached: {_line(error)}",
                hint="Check the address, that the machine reaches it, and that the credentials, "
                "region and\nendpoint in the environment are those of the bucket (AWS_ENDPOINT, "
                "AWS_REGION, ...).",
                path=self._path,
            ) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

"""The file that makes a folder a lake: its format, digest algorithm and id."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from trajreplay.schema.canonical import MAX_BYTES, dump_signed, load_signed
from trajreplay.schema.digest import ALGORITHM
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.layout import LAKE_FILE
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.store import Store
from trajreplay.schema.tables import FORMAT_VERSION


def create_lake(path: str | os.PathLike[str], *, exist_ok: bool = False) -> Store:
    """Make a folder or a prefix of a bucket a lake, and the folder where it is missing.

    Args:
        path: The folder, or an address such as `s3://bucket/prefix`.
        exist_ok: Open what is already a lake instead of refusing it.

    Raises:
        DatasetError: It is a lake already, or no lake can be made there.
    """
    name = os.fspath(path)
    try:
        if not _is_address(name):
            Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(
            f"{name}: cannot make this folder: {error.strerror}",
            hint="Choose a folder that can be written.",
            path=name,
        ) from error
    tree = {"format": FORMAT_VERSION, "digest": ALGORITHM, "lake_id": str(uuid.uuid4())}
    if not _store_at(name).publish_if_absent(LAKE_FILE, dump_signed(tree)) and not exist_ok:
        raise DatasetError(
            f"{name} is a lake already",
            hint="Open it, or create the new one in another folder.",
            path=name,
        )
    return open_lake(path)


def _is_address(name: str) -> bool:
    return "://" in name


def _store_at(name: str) -> Store:
    if not _is_address(name):
        return LocalStore(name)
    from trajreplay.schema.objectstore import ObjectStore

    return ObjectStore(name)


def open_lake(path: str | os.PathLike[str]) -> Store:
    """Open a lake.

    Args:
        path: The folder, or an address such as `s3://bucket/prefix`.

    Raises:
        DatasetError: There is no lake, its file is damaged, or the lake has a newer format or
            another digest algorithm.
    """
    name = os.fspath(path)
    store = _store_at(name)
    is_there = store.folder is None or store.folder.is_dir()
    if not is_there or not store.exists(LAKE_FILE):
        found = "nothing named lake.json there" if is_there else "no folder"
        raise DatasetError(
            f"{name} is not a lake: {found}",
            hint=f"To make it one: trajreplay init {name}",
            path=name,
        )
    where = f"{name}/{LAKE_FILE}"
    data = store.read(LAKE_FILE, MAX_BYTES)
    _refuse_newer(data, where)
    tree = load_signed(data, where)
    version, digest = tree.get("format"), tree.get("digest")
    if type(version) is not int or version != FORMAT_VERSION or digest != ALGORITHM:
        raise DatasetError(
            f"{where}: format {version!r} with digest {digest!r}, expected "
            f"format {FORMAT_VERSION} with digest {ALGORITHM!r}",
            path=where,
        )
    return store


def _refuse_newer(data: bytes, where: str) -> None:
    """A newer format may be signed in another way, so its number is read before the digest."""
    try:
        tree: Any = json.loads(data)
    except (ValueError, RecursionError):
        return
    version = tree.get("format") if isinstance(tree, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        raise DatasetError(
            f"{where}: format {version}, expected at most {FORMAT_VERSION}",
            hint="Upgrade trajreplay to read this lake.",
            path=where,
        )

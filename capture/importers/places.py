"""Where the files of a dump lie: at or below a path, opened safely, and of which run they are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.schema.bundles.folder import is_folder, note_read
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.identity import check_id
from trajreplay.schema.localstore import LocalStore

_SEARCH_DEPTH = 8
_KIN_DEPTH = 2
_NUMBER = re.compile(r"([0-9]+)")
VALIDATION = "-val"  # ends the run of samples that were scored and never trained on


def below(path: Path, wanted: Callable[[Path], bool], depth: int = _SEARCH_DEPTH) -> Iterator[Path]:
    """The files or folders at or below a path that are wanted, those of lower numbers first.

    No link is followed, nothing inside a wanted folder is looked at, and names that begin with a
    dot are passed over.
    """
    path = path.absolute()
    if wanted(path):
        yield path
    elif depth and is_folder(path):
        for child in sorted(_children(path), key=_in_order):
            if not child.name.startswith("."):
                yield from below(child, wanted, depth - 1)


def below_or_damaged(
    path: Path,
    whole: Callable[[Path], bool],
    damaged: Callable[[Path], bool],
    family: Callable[[Path], str | None],
    *,
    folders: bool = False,
    kin: Callable[[Path], Path] = lambda one: one.parent,
) -> Iterator[Path]:
    """The files at or below a path that are of a kind, and damaged ones that lie among them.

    Reading one of these says what is wrong with it; it is not passed by.

    Args:
        path: Where to look.
        whole: Whether a file is of the kind, by what it begins with.
        damaged: Whether a file begins with nothing of any kind.
        family: What the names of files that belong together share; None for any other name.
        folders: Whether sources are folders and not files.
        kin: The folder of which the files belong together, of a file in it or in a folder of it.
    """
    is_source = is_folder if folders else is_plain_file

    @cache
    def families(folder: Path) -> set[tuple[Path, str | None]]:
        return {(kin(one), family(one)) for one in below(folder, whole, _KIN_DEPTH)}

    def wanted(one: Path) -> bool:
        if whole(one):
            return True
        if family(one) is None or not is_source(one) or not damaged(one):
            return False
        return (kin(one), family(one)) in families(kin(one))

    return below(path, wanted)


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError as error:
        raise DatasetError(
            f"{folder} cannot be listed: {error.strerror}", path=str(folder)
        ) from error


def is_plain_file(path: Path) -> bool:
    """Whether a path is a file itself, and no link or device; what cannot be looked at is none."""
    try:
        return path.is_file() and not path.is_symlink()
    except OSError:
        return False


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        DatasetError: It is missing, a link, or no regular file.
    """
    note_read(path)
    return os.fdopen(LocalStore(path.parent).open(path.name), "rb")


def run_of(options: ImportOptions, folder: Path, *, validation: bool = False) -> str:
    """The run that captures are of: what the user says, else the name of a folder.

    What was scored for validation is a run of its own: it counts rollouts as the training does.

    Raises:
        SchemaError: The folder's name cannot be the id of a run.
    """
    name = options.run or folder.absolute().name
    try:
        return check_id("run_id", name + VALIDATION * validation)
    except SchemaError as error:
        raise SchemaError(error.message, hint="Give the run a name: --run ID") from error


def _in_order(path: Path) -> list[tuple[int, str]]:
    """A key by which `step_10` comes after `step_9`."""
    parts = _NUMBER.split(path.name)
    return [(int(one), "") if one.isdecimal() else (-1, one) for one in parts]

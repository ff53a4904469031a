"""Folders of one step with a file for each rank, as prime-rl writes them: `step_5/rank_0.bin`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from trajreplay.capture.importers.places import below_or_damaged, is_plain_file
from trajreplay.schema.bundles.folder import is_folder
from trajreplay.schema.errors import DatasetError

_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_RANK = re.compile(r"rank_(0|[1-9][0-9]{0,8})")


def step_folders(
    path: Path, suffix: str, whole: Callable[[Path], bool], damaged: Callable[[Path], bool]
) -> Iterator[Path]:
    """The folders of steps at or below a path; a path to a file of one stands for all of it.

    Args:
        path: Where to look.
        suffix: What the names of the files end in.
        whole: Whether a file is of the kind, by what it begins with.
        damaged: Whether it begins with nothing of any kind. A folder of none but such ones is
            found where it lies among others.
    """
    asked = path.absolute()
    if is_plain_file(asked) and asked in rank_files(asked.parent, suffix).values():
        asked = asked.parent

    def is_whole(folder: Path) -> bool:
        return any(whole(one) for one in rank_files(folder, suffix).values())

    def is_damaged(folder: Path) -> bool:
        files = rank_files(folder, suffix).values()
        return bool(files) and all(damaged(one) for one in files)

    def family(folder: Path) -> str | None:
        return "step" if _STEP.fullmatch(folder.name) else None

    return below_or_damaged(asked, is_whole, is_damaged, family, folders=True)


def rank_files(folder: Path, suffix: str, *, whole: bool = False) -> dict[int, Path]:
    """The files of a step by rank; none if the folder is not of a step.

    Args:
        folder: The folder.
        suffix: What the names end in.
        whole: Whether it is an error if ranks are missing between others.

    Raises:
        DatasetError: Ranks are missing.
    """
    if not _STEP.fullmatch(folder.name) or not is_folder(folder):
        return {}
    found = {}
    for one in folder.iterdir():
        rank = _RANK.fullmatch(one.name.removesuffix(suffix))
        if one.name.endswith(suffix) and rank is not None and is_plain_file(one):
            found[int(rank[1])] = one
    missing = sorted(set(range(len(found))) - set(found))
    if whole and missing:
        raise DatasetError(
            f"{folder}: files of rank {', '.join(map(str, sorted(found)))}, and none of rank "
            f"{missing[0]}",
            hint="Get the whole folder again: a step is judged whole.",
            path=str(folder),
        )
    return dict(sorted(found.items()))


def step_of(folder: Path) -> int:
    """The step that a folder is of."""
    found = _STEP.fullmatch(folder.name)
    assert found is not None
    return int(found[1])


def run_folder(folder: Path, below: str) -> Path:
    """The folder that names the run of a step's: what `below` is in, or what is inside that."""
    return folder.parent.parent if folder.parent.name == below else folder.parent


def sequence_id(rank: int, batch: int, place: int) -> str:
    """The id of a sequence: trainer and packer name it by its place, and by nothing else."""
    return f"rank-{rank}/{batch}/{place}"

"""Which dump a file is, by what it begins with, and which files of ranks are one dump."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from trajreplay.capture.importers.places import is_plain_file
from trajreplay.schema.bundles.torchhead import Head, head_of
from trajreplay.schema.errors import DatasetError

ROLLOUT, TRAIN = "rollout", "train"
TRAIN_BY_RANK, TRAIN_BY_SAMPLE = "train by rank", "train by sample"


def content_of(head: Head | None) -> str:
    """Which of the dumps a file is; empty for none."""
    if head is None or not head.archive or "rollout_id" not in head.values:
        return ""
    if head.nested == "samples":
        if "format_version" in head.values:
            return TRAIN
        if "rank" in head.values:
            return TRAIN_BY_SAMPLE if "loss_masks" in head.names else ""
        return ROLLOUT if "response_length" in head.names else ""
    return TRAIN_BY_RANK if head.nested == "rollout_data" and "rank" in head.values else ""


def files_of_ranks(path: Path) -> list[Path]:
    """The files of all ranks of the rollout that a file is of, the first rank first.

    Every process of a training writes one, those of each pipeline stage and tensor-parallel copies
    too: a number between 0 and the last that none has is a file that is missing.

    Raises:
        DatasetError: Two are of one rank, or one is missing.
    """
    mine = _place(path)
    if mine is None:
        raise DatasetError(f"{path} changed while it was read", path=str(path))
    ranks: dict[int, Path] = {}
    for one in _by_place(path.parent).get(mine, [path]):
        if _place(one) != mine:
            raise DatasetError(f"{one} changed while it was read", path=str(one))
        if (rank := _rank(one)) in ranks:
            raise DatasetError(
                f"{one} and {ranks[rank].name} are both of rank {rank} of rollout {mine[2]}, "
                "expected one file of each rank",
                hint="Move the one away that is not of this training.",
                path=str(one),
            )
        ranks[rank] = one
    there = sorted(ranks)
    gap = next((place for place, rank in enumerate(there) if rank > place), None)
    if gap is not None:
        more = f" and {len(there) - 10} more" if len(there) > 10 else ""
        raise DatasetError(
            f"{path}: rollout {mine[2]} has files of rank {', '.join(map(str, there[:10]))}{more}, "
            f"and none of rank {gap}",
            hint="Get the files of all ranks: a step is judged whole.",
            path=str(path),
        )
    return [ranks[rank] for rank in there]


@cache
def _by_place(folder: Path) -> Mapping[tuple[Path, str, int], Sequence[Path]]:
    """The files by rank of a folder, whatever their names, with one look at each."""
    found: dict[tuple[Path, str, int], list[Path]] = {}
    for one in sorted(folder.iterdir()):
        place = _place(one) if is_plain_file(one) else None
        if place is not None:
            found.setdefault(place, []).append(one)
    return found


def rank_sets(paths: Sequence[Path]) -> Iterator[Path]:
    """Of files by rank, the first of each rollout, which stands for all."""
    _by_place.cache_clear()  # every search sees folders as they are
    if len(paths) == 1:  # perhaps one of several, of which it alone was named
        yield _first(paths[0])
        return
    first: dict[tuple[Path, str, int] | None, Path] = {}
    for one in paths:
        place = _place(one)
        if place not in first or _rank(one) < _rank(first[place]):
            first[place] = one
    yield from first.values()


def _first(path: Path) -> Path:
    mine = _place(path)
    beside = [] if mine is None else _by_place(path.parent).get(mine, ())
    return min(beside, key=_rank, default=path)


def _place(path: Path) -> tuple[Path, str, int] | None:
    """Which rollout of which folder a file by rank is of."""
    head = head_of(path)
    content = content_of(head)
    if head is None or content not in (TRAIN_BY_RANK, TRAIN_BY_SAMPLE):
        return None
    return path.parent, content, _whole(head.values["rollout_id"])


def _rank(path: Path) -> int:
    head = head_of(path)
    return -1 if head is None else _whole(head.values.get("rank"))


def _whole(value: object) -> int:
    return value if type(value) is int else -1  # what it should be shows when it is read

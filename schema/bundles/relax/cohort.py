"""The ranks of a Relax replay bundle: where a bundle is, and whether all of its ranks are there.

Source: the format as Relax's replay tool writes it (relax/utils/replay/bundle.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trajreplay.schema.bundles.fields import counts, shown, text
from trajreplay.schema.bundles.folder import Folder, is_folder
from trajreplay.schema.bundles.relax.seal import (
    COMPLETE,
    METADATA,
    SealedRank,
    broken,
    listed_ranks,
    load,
    read_rank,
)
from trajreplay.schema.errors import DatasetError

_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,8})")
_SEARCH_DEPTH = 8
_NAMES = (*METADATA, "payloads", COMPLETE)
_ENOUGH = 2


def bundle_folders(path: Path, depth: int = _SEARCH_DEPTH) -> Iterator[Path]:
    """The bundles at or below a path; a path to one rank of a cohort stands for the cohort.

    A name that other tools use too makes no bundle: two of a bundle's names do, or one of a folder
    that lies among bundles and is then a broken one.
    """
    if not is_folder(path):
        return
    path = path.absolute()
    if _RANK.fullmatch(path.name) and _is_cohort(path.parent):
        yield path.parent
    elif _is_source(path):
        yield path
    elif depth:
        # unfinished bundles have names that begin with a dot
        children = sorted(one for one in path.iterdir() if not one.name.startswith("."))
        among = any(_is_source(one) for one in children if is_folder(one))
        for child in children:
            if among and is_folder(child) and _names_in(child):
                yield child
            else:
                yield from bundle_folders(child, depth - 1)


def read_cohort(path: Path) -> list[SealedRank]:
    """Read every rank of a bundle and check all that can be checked without arithmetic.

    Raises:
        DatasetError: Something is missing, changed, unsafe or contradictory.
    """
    folder = Folder(path)
    if not _is_cohort(path):
        return [read_rank(folder, "", None)]
    ranks, shards = _cohort_shards(folder)
    found = [read_rank(folder, f"rank-{rank}/", (rank, ranks, shards[rank])) for rank in ranks]
    for name in ("bundle_id", "format_version"):
        held = {one.manifest.get(name, text) for one in found}
        if len(held) > 1:
            raise broken(f"{folder}: its ranks have {len(held)} values of {name}, expected one")
    return found


def _names_in(path: Path) -> int:
    """How many names of a bundle's files are in a folder."""
    return sum((path / name).exists() for name in _NAMES)


def _is_bundle(path: Path) -> bool:
    return _names_in(path) >= _ENOUGH


def _is_cohort(path: Path) -> bool:
    """Whether a folder holds ranks that are bundles, or signed as such, and is no bundle itself."""
    if _is_bundle(path):
        return False
    try:
        ranks = [one for one in path.iterdir() if _RANK.fullmatch(one.name) and is_folder(one)]
    except OSError:
        return False
    signed = [COMPLETE, *(one.name.replace("rank-", f"{COMPLETE}.") for one in ranks)]
    is_signed = any((path / name).exists() for name in signed)
    return bool(ranks) and (is_signed or any(map(_is_bundle, ranks)))


def _is_source(path: Path) -> bool:
    return _is_bundle(path) or _is_cohort(path)


def _cohort_shards(folder: Folder) -> tuple[tuple[int, ...], dict[int, dict[str, Any]]]:
    """The ranks of a cohort, and what its folder says of each."""
    if not folder.holds(COMPLETE):
        raise DatasetError(
            f"{folder}: no {COMPLETE}: not every rank has written its part",
            hint="Wait for the other ranks, or get the whole folder: a cohort is judged whole.",
            path=str(folder),
        )
    complete = load(folder, COMPLETE)
    ranks = complete.get("ranks", counts)
    if not ranks or ranks != sorted(set(ranks)):
        raise complete.error("ranks", f"is {shown(ranks)}", "distinct ranks in order")
    there = {int(found[1]) for name in folder.names() if (found := _RANK.fullmatch(name))}
    if there != set(ranks):
        raise DatasetError(
            f"{folder}: folders of rank {listed_ranks(there)} are there, {COMPLETE} names rank "
            f"{listed_ranks(ranks)}",
            hint="Get the whole folder again: a cohort is judged whole.",
            path=str(folder),
        )
    shards: dict[int, dict[str, Any]] = {}
    named = complete.object("shards")
    for rank in ranks:
        shard = load(folder, f"{COMPLETE}.{rank}")
        if shard.tree != named.object(str(rank)).tree:
            raise broken(f"{folder}: {COMPLETE} and {COMPLETE}.{rank} disagree on rank {rank}")
        if shard.get("relpath", text) != f"rank-{rank}":
            raise shard.error(
                "relpath", f"is {shown(shard.tree['relpath'])}", f"'rank-{rank}', its own folder"
            )
        if shard.get("expected_ranks", counts) != ranks:
            raise broken(f"{folder}: {COMPLETE}.{rank} expects other ranks than {COMPLETE}")
        shards[rank] = shard.tree
    anchors = {
        json.dumps([one.get("actor_step_id"), one.get("rollout_id")], sort_keys=True)
        for one in shards.values()
    }
    if len(anchors) > 1:
        raise broken(f"{folder}: its ranks are of {len(anchors)} steps or rollouts, expected one")
    return tuple(ranks), shards

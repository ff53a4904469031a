"""The integrity of a Relax replay bundle: its sentinels, hashes, sizes and anchors, rank by rank.

Source: the format as Relax's replay tool writes it (relax/utils/replay/bundle.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajreplay.schema.bundles.fields import Fields, count, counts, shown, text
from trajreplay.schema.bundles.folder import Folder, is_folder
from trajreplay.schema.bundles.strict_json import holds_constants, load_object
from trajreplay.schema.bundles.torchfile import read_tensor
from trajreplay.schema.bundles.unpickle import TensorValue
from trajreplay.schema.errors import DatasetError

COMPLETE = "COMPLETE"
METADATA = ("manifest.json", "index.json", "expected.json")
MAX_PAYLOAD_BYTES = 4 << 30
_RANK = re.compile(r"rank-(0|[1-9][0-9]{0,8})")
_PAYLOAD_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEARCH_DEPTH = 8


@dataclass(frozen=True)
class SealedRank:
    """The files of one rank, each verified against every hash that is given of it.

    Args:
        where: Its folder, for messages.
        rank: The rank.
        expected_ranks: Ranks of the cohort.
        manifest, index, expected: The three metadata files.
        payloads: The tensors by name.
        notes: What was there and is not part of the bundle, or is read with a remark.
    """

    where: str
    rank: int
    expected_ranks: tuple[int, ...]
    manifest: Fields
    index: Fields
    expected: Fields
    payloads: dict[str, TensorValue]
    notes: tuple[str, ...]


def bundle_folders(path: Path, depth: int = _SEARCH_DEPTH) -> Iterator[Path]:
    """The bundles at or below a path; a path to one rank of a cohort stands for the cohort."""
    if not is_folder(path):
        return
    path = path.absolute()
    if _RANK.fullmatch(path.name) and _is_cohort(path.parent):
        yield path.parent
    elif _is_bundle(path) or _is_cohort(path):
        yield path
    elif depth:
        for child in sorted(path.iterdir()):
            if not child.name.startswith("."):  # unfinished bundles have such names
                yield from bundle_folders(child, depth - 1)


def read_cohort(path: Path) -> list[SealedRank]:
    """Read every rank of a bundle and check all that can be checked without arithmetic.

    Raises:
        DatasetError: Something is missing, changed, unsafe or contradictory.
    """
    folder = Folder(path)
    if not _is_cohort(path):
        return [_read_rank(folder, "", None)]
    ranks, shards = _cohort_shards(folder)
    found = [_read_rank(folder, f"rank-{rank}/", (rank, ranks, shards[rank])) for rank in ranks]
    for name in ("bundle_id", "format_version"):
        held = {one.manifest.get(name, text) for one in found}
        if len(held) > 1:
            raise _broken(f"{folder}: its ranks have {len(held)} values of {name}, expected one")
    return found


def _is_bundle(path: Path) -> bool:
    return any((path / name).exists() for name in (*METADATA[:2], "payloads"))


def _is_cohort(path: Path) -> bool:
    """Whether a folder holds a folder for each rank, and is no bundle itself."""
    if _is_bundle(path):
        return False
    try:
        return any(_RANK.fullmatch(child.name) for child in path.iterdir())
    except OSError:
        return False


def _cohort_shards(folder: Folder) -> tuple[tuple[int, ...], dict[int, dict[str, Any]]]:
    """The ranks of a cohort, and what its folder says of each."""
    if not folder.holds(COMPLETE):
        raise DatasetError(
            f"{folder}: no {COMPLETE}: not every rank has written its part",
            hint="Wait for the other ranks, or get the whole folder: a cohort is judged whole.",
            path=str(folder),
        )
    complete = _load(folder, COMPLETE)
    ranks = complete.get("ranks", counts)
    if not ranks or ranks != sorted(set(ranks)):
        raise complete.error("ranks", f"is {shown(ranks)}", "distinct ranks in order")
    there = {int(found[1]) for name in folder.names() if (found := _RANK.fullmatch(name))}
    if there != set(ranks):
        raise DatasetError(
            f"{folder}: folders of rank {_listed(there)} are there, {COMPLETE} names rank "
            f"{_listed(ranks)}",
            hint="Get the whole folder again: a cohort is judged whole.",
            path=str(folder),
        )
    shards: dict[int, dict[str, Any]] = {}
    named = complete.object("shards")
    for rank in ranks:
        shard = _load(folder, f"{COMPLETE}.{rank}")
        if shard.tree != named.object(str(rank)).tree:
            raise _broken(f"{folder}: {COMPLETE} and {COMPLETE}.{rank} disagree on rank {rank}")
        if shard.get("relpath", text) != f"rank-{rank}":
            raise shard.error(
                "relpath", f"is {shown(shard.tree['relpath'])}", f"'rank-{rank}', its own folder"
            )
        if shard.get("expected_ranks", counts) != ranks:
            raise _broken(f"{folder}: {COMPLETE}.{rank} expects other ranks than {COMPLETE}")
        shards[rank] = shard.tree
    anchors = {(shown(one.get("actor_step_id")), one.get("rollout_id")) for one in shards.values()}
    if len(anchors) > 1:
        raise _broken(f"{folder}: its ranks are of {len(anchors)} steps or rollouts, expected one")
    return tuple(ranks), shards


_Place = tuple[int, tuple[int, ...], dict[str, Any]]


def _read_rank(folder: Folder, inside: str, place: _Place | None) -> SealedRank:
    """Read the files of one rank; `place` is its rank, all ranks, and what the cohort says."""
    where = folder.where(inside).rstrip("/")
    if not folder.holds(f"{inside}{COMPLETE}"):
        raise DatasetError(
            f"{where}: no {COMPLETE}: the bundle is not finished",
            hint="Wait until it is written, or get the whole folder again.",
            path=where,
        )
    complete = _load(folder, f"{inside}{COMPLETE}")
    ranks = complete.get("ranks", counts)
    expected_ranks = complete.get("expected_ranks", counts, ranks)
    if place is None and len(expected_ranks) > 1:
        raise DatasetError(
            f"{where}: is one of ranks {_listed(expected_ranks)} and not in the folder of its "
            "cohort",
            hint="Get the whole folder, with rank-0, rank-1 and so on: a cohort is judged whole.",
            path=where,
        )
    rank, all_ranks = (place[0], list(place[1])) if place else (ranks[0] if ranks else 0, ranks)
    if ranks != [rank] or expected_ranks != all_ranks:
        raise _broken(
            f"{where}/{COMPLETE}: ranks are {shown(ranks)} of {shown(expected_ranks)}, expected "
            f"{shown([rank])} of {shown(all_ranks)}"
        )
    contents = {name: folder.read(f"{inside}{name}") for name in METADATA}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    if complete.get("metadata", lambda one: one) != hashes:
        raise _changed(where, hashes, complete)
    notes = _notes_of_constants(contents["expected.json"], where)
    manifest, index, expected = (
        Fields(
            load_object(
                content,
                f"{where}/{name}",
                allow_nan=name == "expected.json",
                bits="loss_mask" if name == "index.json" else "",
            ),
            f"{where}/{name}",
        )
        for name, content in contents.items()
    )
    shard = _load(folder, f"{inside}{COMPLETE}.{rank}")
    _check_shard(shard, index, hashes, all_ranks)
    if place is not None:
        told = {name: one for name, one in place[2].items() if name != "relpath"}
        if told != {name: one for name, one in shard.tree.items() if name != "relpath"}:
            raise _broken(f"{where}: the cohort's {COMPLETE}.{rank} and the rank's own disagree")
    ids = [one.get("bundle_id", text) for one in (manifest, index)]
    if ids[0] != ids[1]:
        raise _broken(
            f"{where}: bundle_id is {ids[0]!r} in manifest.json, {ids[1]!r} in index.json"
        )
    payloads = _payloads(folder, inside, manifest, shard)
    stray = _strays(folder, inside, rank, payloads)
    return SealedRank(
        where, rank, tuple(all_ranks), manifest, index, expected, payloads, (*notes, *stray)
    )


def _check_shard(
    shard: Fields, index: Fields, hashes: dict[str, str], all_ranks: list[int]
) -> None:
    """Hold what a rank signed against its index."""
    if "actor_step_id" not in shard.tree or "rollout_id" not in shard.tree:
        raise _broken(f"{shard.where}: actor_step_id or rollout_id is missing")
    identity = index.object("identity")
    for name in ("actor_step_id", "rollout_id"):
        mine, theirs = shard.tree[name], identity.tree.get(name)
        if mine != theirs or type(mine) is not type(theirs):
            raise _broken(
                f"{shard.where}: {name} is {shown(mine)}, index.json says {shown(theirs)}"
            )
    if shard.get("metadata", lambda one: one, hashes) != hashes:
        raise _changed(shard.where, hashes, shard)
    if shard.get("expected_ranks", counts, all_ranks) != all_ranks:
        raise _broken(f"{shard.where}: expects other ranks than {COMPLETE}")


def _payloads(
    folder: Folder, inside: str, manifest: Fields, shard: Fields
) -> dict[str, TensorValue]:
    signed = shard.object("payloads").tree
    specs = dict(manifest.object("payloads").items())
    if set(signed) != set(specs):
        odd = sorted(set(signed) ^ set(specs))
        raise _broken(
            f"{shard.where}: payloads {', '.join(map(shown, odd[:5]))} are in one of manifest.json "
            "and it, expected in both"
        )
    return {
        name: _payload(folder, inside, name, spec, signed[name]) for name, spec in specs.items()
    }


def _payload(folder: Folder, inside: str, name: str, spec: Fields, signed: Any) -> TensorValue:
    if not _PAYLOAD_NAME.fullmatch(name):
        raise _broken(f"{spec.where}: {shown(name)} is no name of a payload")
    if spec.get("name", text) != name:
        raise spec.error("name", f"is {shown(spec.tree['name'])}", f"{name!r}, as it is listed")
    size, sha256 = spec.get("bytes", count), spec.get("sha256", text)
    if not _SHA256.fullmatch(sha256) or signed != sha256:
        raise _broken(f"{spec.where}: the sentinel of its rank has another sha256 of {name}")
    path = f"{inside}payloads/{name}.pt"
    content = folder.read(path, MAX_PAYLOAD_BYTES)
    where = folder.where(path)
    if len(content) != size:
        raise _broken(f"{where}: {len(content)} bytes, manifest.json says {size}")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise _broken(f"{where}: its bytes do not have the sha256 that manifest.json gives")
    tensor = read_tensor(content, where)
    claimed = spec.get("dtype", text), tuple(spec.get("shape", counts))
    if claimed != (f"torch.{tensor.dtype}", tensor.shape):
        raise _broken(
            f"{where}: a tensor of torch.{tensor.dtype} and shape {tensor.shape}, manifest.json "
            f"says {shown(claimed[0])} and {claimed[1]}"
        )
    return tensor


def _notes_of_constants(content: bytes, where: str) -> list[str]:
    if not holds_constants(content):
        return []
    return [f"{where}/expected.json: NaN or Infinity, which is no JSON, is read as that number"]


def _strays(
    folder: Folder, inside: str, rank: int, payloads: dict[str, TensorValue]
) -> Iterator[str]:
    expected = {*METADATA, COMPLETE, f"{COMPLETE}.{rank}", "payloads"}
    odd = set(folder.names(inside.rstrip("/"))) - expected
    if payloads:
        there = set(folder.names(f"{inside}payloads")) - {f"{name}.pt" for name in payloads}
        odd |= {f"payloads/{name}" for name in there}
    for name in sorted(odd):
        yield f"{folder.where(inside).rstrip('/')}: {shown(name)} is no part of the bundle: ignored"


def _load(folder: Folder, path: str) -> Fields:
    where = folder.where(path)
    return Fields(load_object(folder.read(path), where), where)


def _changed(where: str, hashes: dict[str, str], signed: Fields) -> DatasetError:
    given = signed.tree.get("metadata")
    told = given if type(given) is dict else {}
    wrong = [name for name in METADATA if told.get(name) != hashes[name]] or [shown(sorted(told))]
    return _broken(
        f"{where}: {', '.join(wrong)} does not have the sha256 in {Path(signed.where).name}: "
        "changed after it was written"
    )


def _listed(ranks: Any) -> str:
    return ", ".join(map(str, sorted(ranks))) or "none"


def _broken(message: str) -> DatasetError:
    return DatasetError(
        message,
        hint="The bundle is not what was written: get it again from where it was captured.",
    )

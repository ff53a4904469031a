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
from trajreplay.schema.bundles.folder import Folder
from trajreplay.schema.bundles.strict_json import holds_constants, load_object
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.bundles.torchfile import read_tensor
from trajreplay.schema.errors import DatasetError

COMPLETE = "COMPLETE"
METADATA = ("manifest.json", "index.json", "expected.json")
MAX_PAYLOAD_BYTES = 4 << 30
_PAYLOAD_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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


_Place = tuple[int, tuple[int, ...], dict[str, Any]]


def read_rank(folder: Folder, inside: str, place: _Place | None) -> SealedRank:
    """Read the files of one rank and hold each against every hash that is given of it.

    Args:
        folder: The bundle.
        inside: Its folder there, with a slash; empty for a bundle of one rank.
        place: Its rank, all ranks, and what the cohort says of it.

    Raises:
        DatasetError: Something is missing, changed, unsafe or contradictory.
    """
    where = folder.where(inside).rstrip("/")
    if not folder.holds(f"{inside}{COMPLETE}"):
        raise DatasetError(
            f"{where}: no {COMPLETE}: the bundle is not finished",
            hint="Wait until it is written, or get the whole folder again.",
            path=where,
        )
    complete = load(folder, f"{inside}{COMPLETE}")
    ranks = complete.get("ranks", counts)
    expected_ranks = complete.get("expected_ranks", counts, ranks)
    if place is None and len(expected_ranks) > 1:
        raise DatasetError(
            f"{where}: is one of ranks {listed_ranks(expected_ranks)} and not in the folder of its "
            "cohort",
            hint="Get the whole folder, with rank-0, rank-1 and so on: a cohort is judged whole.",
            path=where,
        )
    rank, all_ranks = (place[0], list(place[1])) if place else (ranks[0] if ranks else 0, ranks)
    if ranks != [rank] or expected_ranks != all_ranks:
        raise broken(
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
    shard = load(folder, f"{inside}{COMPLETE}.{rank}")
    _check_shard(shard, index, hashes, all_ranks)
    if place is not None:
        told = {name: one for name, one in place[2].items() if name != "relpath"}
        if told != {name: one for name, one in shard.tree.items() if name != "relpath"}:
            raise broken(f"{where}: the cohort's {COMPLETE}.{rank} and the rank's own disagree")
    ids = [one.get("bundle_id", text) for one in (manifest, index)]
    if ids[0] != ids[1]:
        raise broken(f"{where}: bundle_id is {ids[0]!r} in manifest.json, {ids[1]!r} in index.json")
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
        raise broken(f"{shard.where}: actor_step_id or rollout_id is missing")
    identity = index.object("identity")
    for name in ("actor_step_id", "rollout_id"):
        mine, theirs = shard.tree[name], identity.tree.get(name)
        if mine != theirs or type(mine) is not type(theirs):
            raise broken(f"{shard.where}: {name} is {shown(mine)}, index.json says {shown(theirs)}")
    if shard.get("metadata", lambda one: one, hashes) != hashes:
        raise _changed(shard.where, hashes, shard)
    if shard.get("expected_ranks", counts, all_ranks) != all_ranks:
        raise broken(f"{shard.where}: expects other ranks than {COMPLETE}")


def _payloads(
    folder: Folder, inside: str, manifest: Fields, shard: Fields
) -> dict[str, TensorValue]:
    signed = shard.object("payloads").tree
    specs = dict(manifest.object("payloads").items())
    if set(signed) != set(specs):
        odd = sorted(set(signed) ^ set(specs))
        raise broken(
            f"{shard.where}: payloads {', '.join(map(shown, odd[:5]))} are in one of manifest.json "
            "and it, expected in both"
        )
    return {
        name: _payload(folder, inside, name, spec, signed[name]) for name, spec in specs.items()
    }


def _payload(folder: Folder, inside: str, name: str, spec: Fields, signed: Any) -> TensorValue:
    if not _PAYLOAD_NAME.fullmatch(name):
        raise broken(f"{spec.where}: {shown(name)} is no name of a payload")
    if spec.get("name", text) != name:
        raise spec.error("name", f"is {shown(spec.tree['name'])}", f"{name!r}, as it is listed")
    size, sha256 = spec.get("bytes", count), spec.get("sha256", text)
    if not _SHA256.fullmatch(sha256) or signed != sha256:
        raise broken(f"{spec.where}: the sentinel of its rank has another sha256 of {name}")
    path = f"{inside}payloads/{name}.pt"
    content = folder.read(path, MAX_PAYLOAD_BYTES)
    where = folder.where(path)
    if len(content) != size:
        raise broken(f"{where}: {len(content)} bytes, manifest.json says {size}")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise broken(f"{where}: its bytes do not have the sha256 that manifest.json gives")
    tensor = read_tensor(content, where)
    claimed = spec.get("dtype", text), tuple(spec.get("shape", counts))
    if claimed != (f"torch.{tensor.dtype}", tensor.shape):
        raise broken(
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


def load(folder: Folder, path: str) -> Fields:
    """One of its files of JSON.

    Raises:
        DatasetError: It is missing, or none.
    """
    where = folder.where(path)
    return Fields(load_object(folder.read(path), where), where)


def _changed(where: str, hashes: dict[str, str], signed: Fields) -> DatasetError:
    given = signed.tree.get("metadata")
    told = given if type(given) is dict else {}
    wrong = [name for name in METADATA if told.get(name) != hashes[name]] or [shown(sorted(told))]
    return broken(
        f"{where}: {', '.join(wrong)} does not have the sha256 in {Path(signed.where).name}: "
        "changed after it was written"
    )


def listed_ranks(ranks: Any) -> str:
    """Ranks in a message."""
    return ", ".join(map(str, sorted(ranks))) or "none"


def broken(message: str) -> DatasetError:
    """What to raise of a bundle that contradicts itself."""
    return DatasetError(
        message,
        hint="The bundle is not what was written: get it again from where it was captured.",
    )

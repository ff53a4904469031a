"""Relax replay bundles of format 1.0.0, written from records of captures."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajreplay.schema.bundles.folder import MAX_METADATA_BYTES
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.bundles.relax.describe import (
    expected_tree,
    group_numbers,
    index_tree,
    manifest_tree,
    step_tree,
)
from trajreplay.schema.bundles.relax.left_out import converted, left_out
from trajreplay.schema.bundles.relax.read_back import check_reads_back
from trajreplay.schema.bundles.relax.results import TOKEN_COLUMNS
from trajreplay.schema.bundles.relax.seal import COMPLETE, METADATA
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.errors import CaptureError, DatasetError
from trajreplay.schema.layout import quoted


@dataclass(frozen=True)
class Written:
    """A bundle that was written.

    Args:
        path: Its folder.
        notes: What the captures hold and the bundle does not.
    """

    path: Path
    notes: tuple[str, ...]


def write_bundle(records: Sequence[CaptureRecord], folder: Path) -> Written:
    """Write the captures of one rollout or step, one a rank, as a bundle.

    Args:
        records: All ranks of the capture set.
        folder: Where the bundle's own folder is made.

    Raises:
        CaptureError: A bundle cannot hold it, or the folder is there already.
    """
    bundle_id = _bundle_id(records[0])
    target = folder / quoted(bundle_id)
    if target.exists():
        raise CaptureError(f"{target} is there already", hint="Choose another folder.")
    aside = folder / f".{target.name[:200]}.tmp-{os.getpid()}"
    where = f"run {records[0].run_id!r} {bundle_id}"
    notes: dict[str, None] = {}
    groups = group_numbers(records, notes)
    try:
        shards = {}
        for record in records:
            inside = f"rank-{record.rank}" if len(record.expected_ranks) > 1 else "."
            shard = _write_rank(record, aside / inside, bundle_id, groups, notes)
            shards[record.rank] = shard | {"relpath": inside}
        if len(shards) > 1:
            for rank, shard in shards.items():
                _write_json(aside / f"{COMPLETE}.{rank}", shard)
            tree = {"ranks": sorted(shards), "shards": {str(r): s for r, s in shards.items()}}
            _write_json(aside / COMPLETE, tree)
        check_reads_back(aside, records, where)
        aside.rename(target)
    except OSError as error:
        raise DatasetError(
            f"{target} cannot be written: {error.strerror}", hint="Choose a folder with room."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Written(target, (*notes, *left_out(records, bundle_id)))


def _bundle_id(record: CaptureRecord) -> str:
    """The id that it came with, or one that an import reads the run from."""
    came = record.producer.extra.get("bundle_id")
    if came:
        return came
    if record.step_id is None:
        return f"{record.run_id}-rollout-{record.rollout_id}"
    return f"{record.run_id}-{record.rollout_id}-{record.step_id}"


def _write_rank(
    record: CaptureRecord,
    folder: Path,
    bundle_id: str,
    groups: Mapping[str, int],
    notes: dict[str, None],
) -> dict[str, Any]:
    """Write the files of one rank, and return what it signs."""
    declared = {one.stage for one in record.stages if one.capability == "recompute"}
    where = f"run {record.run_id!r} {bundle_id} rank {record.rank}"
    _refuse_gaps(record, declared, where)
    (folder / "payloads").mkdir(parents=True)
    payloads = {
        name: _write_payload(folder / "payloads" / f"{name}.pt", name, tensor)
        for name, tensor in record.tensors.items()
        if name in TOKEN_COLUMNS
    }
    trees = {
        "manifest.json": manifest_tree(record, bundle_id, payloads),
        "index.json": index_tree(record, bundle_id, groups, declared, where),
        "expected.json": expected_tree(record),
    }
    for name in METADATA:
        size = _write_json(folder / name, trees[name])
        if size > MAX_METADATA_BYTES:
            raise CaptureError(
                f"{where}: {name} would take {size:,} bytes, and no more than "
                f"{MAX_METADATA_BYTES:,} of it are read",
                hint="Export a lake instead: trajreplay export lake.",
            )
    notes.update(dict.fromkeys(record.notes))
    notes.update(dict.fromkeys(converted(record)))
    metadata = {one: hashlib.sha256((folder / one).read_bytes()).hexdigest() for one in METADATA}
    step = record.step_id
    shard = {
        "actor_step_id": None if step is None else step_tree(record),
        "rollout_id": record.rollout_id if step is None else None,
        "payloads": {name: spec["sha256"] for name, spec in payloads.items()},
        "metadata": metadata,
        "expected_ranks": list(record.expected_ranks),
    }
    _write_json(folder / f"{COMPLETE}.{record.rank}", shard)
    complete = {"ranks": [record.rank], "expected_ranks": list(record.expected_ranks)}
    _write_json(folder / COMPLETE, complete | {"metadata": metadata})
    return shard


def _refuse_gaps(record: CaptureRecord, declared: set[str], where: str) -> None:
    needed = {
        "reward.post_process": ("raw_reward", "reward"),
        "reward.raw": ("raw_reward",),
        "advantage.estimate": ("reward",),
    }
    for stage, names in needed.items():
        for name in names if stage in declared else ():
            if any(getattr(one, name) is None for one in record.samples):
                raise CaptureError(
                    f"{where}: {stage} is declared and not every sample has a {name}",
                    hint="A bundle would have to make one up: export captures that have it.",
                )
    for one in record.samples:
        for name in ("raw_reward", "reward"):
            value = getattr(one, name)
            if value is not None and not math.isfinite(value):
                raise CaptureError(
                    f"{where}: {name} of {one.sample_id!r} is {value}, and index.json holds finite "
                    "numbers alone",
                    hint="Export a lake instead: trajreplay export lake.",
                )
    if not record.samples:
        raise CaptureError(f"{where}: no samples, and a bundle has at least one")


def _write_payload(path: Path, name: str, tensor: TensorValue) -> dict[str, Any]:
    import torch

    values = torch.from_numpy(tensor.values.copy())
    if tensor.dtype == "bfloat16":
        values = values.view(torch.bfloat16)
    torch.save(values, path)
    content = path.read_bytes()
    return {
        "name": name,
        "dtype": str(values.dtype),
        "shape": list(values.shape),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _write_json(path: Path, tree: Mapping[str, Any]) -> int:
    """Write a file of JSON, and return its size; only results may hold what JSON has no word for.

    Raises:
        CaptureError: Anything else does.
    """
    try:
        text = json.dumps(
            tree,
            indent=2,
            sort_keys=True,
            ensure_ascii=False,
            allow_nan=path.name == "expected.json",
        )
    except ValueError as error:
        raise CaptureError(
            f"{path.name} would hold a number that JSON has no word for: {error}",
            hint="Export a lake instead: trajreplay export lake.",
        ) from error
    return path.write_bytes(f"{text}\n".encode())

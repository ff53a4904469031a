"""Relax replay bundles of format 1.0.0, written from records of captures."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajreplay.schema.bundles.record import CaptureRecord, Scalars
from trajreplay.schema.bundles.relax.config import write_config
from trajreplay.schema.bundles.relax.results import TOKEN_COLUMNS
from trajreplay.schema.bundles.relax.samples import is_loss_alone
from trajreplay.schema.bundles.relax.seal import COMPLETE, METADATA
from trajreplay.schema.bundles.unpickle import TensorValue
from trajreplay.schema.errors import CaptureError, DatasetError
from trajreplay.schema.identity import own_prefix, rank_prefix
from trajreplay.schema.layout import quoted
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.schema.records import SampleRecord

FORMAT_VERSION = "1.0.0"
_GROUP = re.compile(r"g-(0|[1-9][0-9]{0,8})")
# Facts of a sample that a bundle has no place for.
_LEFT_OUT = ("group_size", "trajectory_id", "weight_versions", "truncated", "prompt", "response")
_TEXTS = ("label", "tool_output")


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
    notes: dict[str, None] = {}
    groups = _group_numbers(records, notes)
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
        aside.rename(target)
    except OSError as error:
        raise DatasetError(
            f"{target} cannot be written: {error.strerror}", hint="Choose a folder with room."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Written(target, (*notes, *_no_place(records, bundle_id)))


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
    prefix = _prefix(record)
    (folder / "payloads").mkdir(parents=True)
    payloads = {
        name: _write_payload(folder / "payloads" / f"{name}.pt", name, tensor)
        for name, tensor in record.tensors.items()
        if name in TOKEN_COLUMNS
    }
    trees = {
        "manifest.json": _manifest(record, bundle_id, payloads),
        "index.json": {
            "bundle_id": bundle_id,
            "identity": _identity(record, groups, prefix),
            "config": write_config(_settings(record, where), "reward.post_process" in declared),
            "samples": list(_samples(record, groups, prefix, loss_alone=is_loss_alone(declared))),
        },
        "expected.json": _expected(record),
    }
    for name in METADATA:
        _write_json(folder / name, trees[name])
    notes.update(dict.fromkeys(record.notes))
    metadata = {one: hashlib.sha256((folder / one).read_bytes()).hexdigest() for one in METADATA}
    step = record.step_id
    shard = {
        "actor_step_id": None if step is None else _step(record),
        "rollout_id": record.rollout_id if step is None else None,
        "payloads": {name: spec["sha256"] for name, spec in payloads.items()},
        "metadata": metadata,
        "expected_ranks": list(record.expected_ranks),
    }
    _write_json(folder / f"{COMPLETE}.{record.rank}", shard)
    complete = {"ranks": [record.rank], "expected_ranks": list(record.expected_ranks)}
    _write_json(folder / COMPLETE, complete | {"metadata": metadata})
    return shard


def _step(record: CaptureRecord) -> dict[str, Any]:
    return {"rollout_id": record.rollout_id, "step_id": record.step_id}


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
    if not record.samples:
        raise CaptureError(f"{where}: no samples, and a bundle has at least one")


def _prefix(record: CaptureRecord) -> str:
    """What the import put before the ids: the first rank of its tensor-parallel group."""
    if not own_prefix(record.producer.to_json(), record.rank):
        return ""
    place = record.expected_ranks.index(record.rank) - record.parallel.tensor_rank
    return rank_prefix(record.expected_ranks[place])


def _group_numbers(records: Sequence[CaptureRecord], notes: dict[str, None]) -> dict[str, int]:
    """A number for each group: its own where every one has one, else in order of appearance."""
    names: dict[str, str] = {}
    for record in records:
        prefix = _prefix(record)
        for one in record.samples:
            if one.group_id is not None:
                names.setdefault(one.group_id, one.group_id.removeprefix(prefix))
    found = {name: _GROUP.fullmatch(short) for name, short in names.items()}
    if all(found.values()):
        return {name: int(one[1]) for name, one in found.items() if one}
    notes["groups have numbers in a bundle: theirs are given in order of appearance"] = None
    return {name: number for number, name in enumerate(found)}


def _samples(
    record: CaptureRecord, groups: Mapping[str, int], prefix: str, *, loss_alone: bool
) -> Iterator[dict[str, Any]]:
    blank = loss_alone and all(one.reward is one.raw_reward is None for one in record.samples)
    for one in record.samples:
        group = None if one.group_id is None else groups[one.group_id]
        micro_batch = one.micro_batch_id
        yield {
            "sample_id": one.sample_id.removeprefix(prefix),
            "group_index": 0 if group is None and blank else group,
            "response_length": one.response_length,
            "total_length": one.total_length,
            "loss_mask": list(one.loss_mask),
            "raw_reward": 0.0 if blank else one.raw_reward,
            "reward": 0.0 if blank else one.reward,
            "label_hash": None,
            "micro_batch_id": micro_batch and micro_batch.removeprefix(prefix),
        }


def _identity(record: CaptureRecord, groups: Mapping[str, int], prefix: str) -> dict[str, Any]:
    extra, place = record.producer.extra, record.parallel

    def listed(field: str, fact: str = "") -> list[str]:
        held = [getattr(one, field) for one in record.samples]
        mine = dict.fromkeys(one.removeprefix(prefix) for one in held if one is not None)
        return list(mine) or json.loads(extra.get(fact, "[]"))

    semantic = dict.fromkeys(one.group_id for one in record.samples if one.group_id is not None)
    return {
        "actor_step_id": None if record.step_id is None else _step(record),
        "rollout_id": record.rollout_id if record.step_id is None else None,
        "rollout_partition_ids": listed("rollout_partition_id", "rollout_partition_ids"),
        "consumer_batch_ids": listed("consumer_batch_id", "consumer_batch_ids"),
        "micro_batch_ids": listed("micro_batch_id"),
        "semantic_group_ids": [f"g-{groups[one]}" for one in semantic],
        "normalization_cohort_ids": json.loads(extra.get("normalization_cohort_ids", "[]")),
        "weight_lineage": {name: extra.get(name) for name in ("rollout_weight", "actor_weight")},
        "rank": {
            "dp": place.data_size,
            "tp": place.tensor_size,
            "pp": place.pipeline_size,
            "cp": place.context_size,
        },
    }


def _manifest(record: CaptureRecord, bundle_id: str, payloads: Mapping[str, Any]) -> dict[str, Any]:
    extra = record.producer.extra
    theirs = json.loads(extra.get("implementation", "{}"))
    return {
        "format_version": FORMAT_VERSION,
        "bundle_id": bundle_id,
        "producer": {
            "commit": record.producer.commit,
            "dirty_patch_digest": extra.get("dirty_patch_digest", ""),
            "torch_version": record.producer.torch_version,
        },
        "stage_contracts": {
            one.stage: {
                "stage": one.stage,
                "version": "v1",
                "capability": one.capability,
                "implementation": theirs.get(one.stage, one.implementation.partition(":")[0]),
                "inputs": [],
                "expected_outputs": [],
            }
            for one in record.stages
        },
        "payloads": payloads,
        "comparison_policy": {
            "exact_fields": ["sample_id", "loss_mask", "group_index"],
            "tolerances": {
                name: {"atol": one.atol, "rtol": one.rtol}
                for name, one in record.tolerances.items()
            },
        },
        "redaction": dict(record.redaction),
    }


def _settings(record: CaptureRecord, where: str) -> RecomputeConfig:
    """The settings in the short form, which is all that a bundle can say."""
    if isinstance(record.settings, RecomputeConfig):
        return record.settings
    found, differs = RecomputeConfig.of(record.settings)
    if differs:
        raise CaptureError(
            f"{where}: a bundle cannot say the settings {', '.join(differs[:5])}",
            hint="Export a lake instead: trajreplay export lake.",
        )
    return found


def _expected(record: CaptureRecord) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for one in record.scalars:
        if _has_place(one):
            found.setdefault(one.stage, {}).update(one.fields)
    return found


def _has_place(one: Scalars) -> bool:
    """Whether a bundle means the same by it: a scalar of a sample, or the plain sum of a rank."""
    return one.scope == "sample" or (one.scope, one.reduction, one.scale) == ("rank", "sum", 1.0)


def _no_place(records: Sequence[CaptureRecord], bundle_id: str) -> Iterator[str]:
    """What the captures hold and no bundle can, as one sentence."""
    ranks: dict[str, list[int]] = {}
    for record in records:
        for what in dict.fromkeys(_left_out(record)):
            ranks.setdefault(what, []).append(record.rank)
    if ranks:
        told = "; ".join(
            what if len(of) == len(records) else f"{what} (of ranks {', '.join(map(str, of))})"
            for what, of in ranks.items()
        )
        yield f"{bundle_id}: a bundle has no place for these, which are left out: {told}"


def _left_out(record: CaptureRecord) -> Iterator[str]:
    scalars: dict[str, dict[str, None]] = {}
    for one in record.scalars:
        if not _has_place(one):
            factor = "" if one.scale == 1.0 else f" times {one.scale:g}"
            of = f"at scope {one.scope} by {one.reduction or 'an unstated reduction'}{factor}"
            scalars.setdefault(f"{one.stage} {of}", {}).update(dict.fromkeys(one.fields))
    for of, fields in scalars.items():
        yield f"{', '.join(fields)} of {of}"
    for name in (*_LEFT_OUT, *_TEXTS):
        if any(getattr(one, name) is not None for one in record.samples):
            yield name
    if any(_foreign(one, record) for one in record.samples):
        yield "which rollout a sample is from"


def _foreign(one: SampleRecord, record: CaptureRecord) -> bool:
    return one.source_rollout_id not in (None, record.rollout_id)


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


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    text = json.dumps(tree, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")

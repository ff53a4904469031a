"""Relax replay bundles of formats 1.x and 2.x, read into records of captures.

Source: the fields as Relax's replay tool writes them (relax/utils/replay/schema.py, capture.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields, shown
from trajreplay.schema.bundles.record import CaptureRecord, Scalars
from trajreplay.schema.bundles.relax.config import read_config
from trajreplay.schema.bundles.relax.seal import SealedRank, read_cohort
from trajreplay.schema.bundles.unpickle import TensorValue
from trajreplay.schema.contracts import CAPABILITIES, StageContract, stage_named
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import (
    BY_RANK,
    GLOBAL,
    IDS,
    ParallelCoordinates,
    ProducerInfo,
    rank_prefix,
)
from trajreplay.schema.policy import TOLERANCES, Tolerance
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.tables import RESPONSE_LISTS

TOKEN_COLUMNS = tuple(name for name in RESPONSE_LISTS if name != "loss_mask")
FORMATS = (1, 2)
_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})")
_LOSSES = ("loss.policy", "loss.value")
_MANIFEST = (
    *("format_version", "bundle_id", "producer", "stage_contracts", "payloads"),
    *("comparison_policy", "redaction"),
)
_INDEX = ("bundle_id", "identity", "samples", "config")
_SAMPLE = (
    *("sample_id", "group_index", "response_length", "total_length", "loss_mask"),
    *("raw_reward", "reward", "label_hash", "micro_batch_id"),
)
_ECHOES = {"raw_rewards": "raw_reward", "rewards": "reward"}
_DTYPES = ("float32", "float64", "float16", "bfloat16")


def read_bundle(
    path: Path, *, run_id: str | None = None, ids: str = BY_RANK
) -> list[CaptureRecord]:
    """Read a bundle, all ranks of it.

    Args:
        path: Its folder; that of a cohort holds a folder for each rank.
        run_id: The training job; by default what its bundle id begins with.
        ids: What sample, group and micro-batch ids are local to: their `rank`, so that they are
            prefixed with it, or nothing (`global`).

    Returns:
        One record a rank.

    Raises:
        DatasetError: It is broken, unsafe, incomplete or contradicts itself.
    """
    ranks = read_cohort(path)
    places = _places(ranks)
    records = [_record(one, place, run_id, ids) for one, place in zip(ranks, places, strict=True)]
    _check_ids(records, ids)
    return records


@dataclass(frozen=True)
class _Place:
    """Where a rank stands, and what its ids are prefixed with."""

    parallel: ParallelCoordinates
    prefix: str


def _places(ranks: Sequence[SealedRank]) -> list[_Place]:
    """Ranks of one tensor-parallel group hold the same samples: those of its first are owned.

    A bundle says how large each dimension is, and not where its rank stands in it: ranks of a
    tensor-parallel group are taken to be neighbours. Where they are not, their columns differ, and
    a copy that differs from its owner is reported.
    """
    found = []
    for at, one in enumerate(ranks):
        sizes = one.index.object("identity").object("rank", {})
        size = {name: sizes.get(name, read.count, 1) or 1 for name in ("dp", "tp", "pp", "cp")}
        tensor = size["tp"] if len(ranks) > 1 else 1
        if len(ranks) % tensor:
            raise DatasetError(
                f"{one.where}: {len(ranks)} ranks and a tensor-parallel size of {tensor}, expected "
                "whole tensor-parallel groups"
            )
        data, place = divmod(at, tensor)
        parallel = ParallelCoordinates(
            data_rank=data,
            data_size=max(size["dp"], len(ranks) // tensor),
            tensor_rank=place,
            tensor_size=size["tp"],
            pipeline_rank=size["pp"] - 1,  # the last one has the outputs, and captures
            pipeline_size=size["pp"],
            context_size=size["cp"],
        )
        found.append(_Place(parallel, rank_prefix(ranks[at - place].rank)))
    return found


def _record(one: SealedRank, place: _Place, run_id: str | None, ids: str) -> CaptureRecord:
    major = _major(one.manifest)
    bundle_id = one.manifest.get("bundle_id", read.identifier)
    identity = one.index.object("identity")
    rollout_id, step_id = _anchor(identity)
    contracts = dict(_contracts(one.manifest, major))
    declared = {name for name, contract in contracts.items() if contract.capability == "recompute"}
    prefix = "" if ids == GLOBAL else place.prefix
    samples = _samples(one.index, identity, major, prefix)
    if is_loss_alone(declared):
        samples = _without_placeholders(samples)
    _refuse_twice(one.where, samples)
    tensors, scalars = _results(one, samples)
    config, unstated = read_config(
        one.index.object("config"), with_reward=major == 1 and "reward.post_process" in declared
    )
    _check_inputs(one.where, declared, tensors, config.kl_coef)
    short = _short_groups(samples, config.n_samples_per_prompt)
    if short and len(one.expected_ranks) > 1 and prefix and "reward.post_process" in declared:
        raise DatasetError(
            f"{one.where}: group {short[0]!r} has {short[1]} samples on this rank, expected "
            f"{config.n_samples_per_prompt}, and group ids are taken as local to their rank",
            hint="If a group of one number lies on several ranks, import with --ids global.",
        )
    facts = {
        "bundle_id": bundle_id,
        "bundle_format": one.manifest.get("format_version", read.text),
        IDS: BY_RANK if prefix else GLOBAL,
        "implementation": _implementations(one.manifest),
        "unstated": ", ".join(unstated),
        **dict(_provenance(identity)),
    }
    producer = one.manifest.object("producer", {})
    return CaptureRecord(
        run_id=run_id or _run_of(bundle_id, rollout_id, step_id),
        rollout_id=rollout_id,
        step_id=step_id,
        rank=one.rank,
        expected_ranks=one.expected_ranks,
        settings=config,
        samples=tuple(samples),
        tensors=tensors,
        scalars=scalars,
        stages=tuple(contracts.values()),
        tolerances=dict(_tolerances(one.manifest)),
        producer=ProducerInfo(
            commit=producer.get("commit", read.text, ""),
            torch_version=producer.get("torch_version", read.text, ""),
            framework="relax",
            extra={
                name: value
                for name, value in {
                    **facts,
                    "dirty_patch_digest": producer.get("dirty_patch_digest", read.text, ""),
                }.items()
                if value
            },
        ),
        parallel=place.parallel,
        redaction=one.manifest.get("redaction", read.text_map, {}),
        notes=(*one.notes, *_left_out(one)),
    )


def _major(manifest: Fields) -> int:
    version = manifest.get("format_version", read.text)
    found = _VERSION.fullmatch(version)
    if found is None or int(found[1]) not in FORMATS:
        raise DatasetError(
            f"{manifest.where}: format_version is {shown(version)}, expected 1.x.y or 2.x.y",
            hint="A newer version of trajreplay may know it.",
            path=manifest.where,
        )
    return int(found[1])


def _anchor(identity: Fields) -> tuple[int, int | None]:
    """The rollout, and the step of a bundle that is of one."""
    step, rollout_id = "actor_step_id" in identity, "rollout_id" in identity
    if step == rollout_id:
        raise DatasetError(
            f"{identity.where}: actor_step_id and rollout_id are {'both' if step else 'neither'} "
            "set, expected one of them",
            hint="A bundle is of one optimizer step or of one rollout.",
            path=identity.where,
        )
    if rollout_id:
        return identity.get("rollout_id", read.coordinate), None
    anchor = identity.object("actor_step_id")
    return anchor.get("rollout_id", read.coordinate), anchor.get("step_id", read.coordinate)


def _run_of(bundle_id: str, rollout_id: int, step_id: int | None) -> str:
    """The run that a bundle id names: Relax appends the step or rollout to a prefix."""
    ending = f"-rollout-{rollout_id}" if step_id is None else f"-{rollout_id}-{step_id}"
    return bundle_id.removesuffix(ending) or bundle_id


def _contracts(manifest: Fields, major: int) -> Iterator[tuple[str, StageContract]]:
    """What is claimed of each stage; who computed it then says nothing of who does now."""
    for name, claim in manifest.object("stage_contracts").items():
        stage_named(name)
        if claim.get("stage", read.text, name) != name:
            raise claim.error("stage", f"is {shown(claim.tree['stage'])}", f"{name!r}")
        capability = claim.get("capability", read.text)
        if capability not in CAPABILITIES:
            raise claim.error(
                "capability", f"is {shown(capability)}", f"one of {', '.join(CAPABILITIES)}"
            )
        if claim.get("version", read.text) != f"v{major}":
            raise claim.error("version", f"is {shown(claim.tree['version'])}", f"'v{major}'")
        reason = "" if capability == "recompute" else "declared so by the bundle"
        # Both formats are of the arithmetic that contract version v1 froze.
        yield name, StageContract(name, capability, "v1", reason)


def _implementations(manifest: Fields) -> str:
    """Whose code the producer's own tool recomputes the stages with."""
    found = {
        name: claim.get("implementation", read.text, "")
        for name, claim in manifest.object("stage_contracts").items()
    }
    return json.dumps({name: one for name, one in found.items() if one})


def _tolerances(manifest: Fields) -> Iterator[tuple[str, Tolerance]]:
    policy = manifest.object("comparison_policy", {}).object("tolerances", {})
    plain = TOLERANCES["float32"]
    for name, one in policy.items():
        stage_named(name)
        one.refuse_unknown(("atol", "rtol"), "a tolerance has these parts")
        atol, rtol = (
            one.get("atol", read.number, plain.atol),
            one.get("rtol", read.number, plain.rtol),
        )
        if not (atol >= 0 and rtol >= 0):
            raise one.error("atol or rtol", f"is {atol:g}, {rtol:g}", "numbers from 0 on")
        yield name, Tolerance(atol, rtol)


def _samples(index: Fields, identity: Fields, major: int, prefix: str) -> list[SampleRecord]:
    partitions = identity.get("rollout_partition_ids", read.texts, [])
    batches = identity.get("consumer_batch_ids", read.texts, [])
    found = []
    for one in index.objects("samples"):
        group: int | None = one.get("group_index", read.count, None)
        micro_batch: str | None = one.get("micro_batch_id", read.identifier, None)
        if major == 1 and not {"raw_reward", "reward"} <= set(one):
            raise one.error("raw_reward or reward", "is missing", "a value or null in format 1")
        found.append(
            SampleRecord(
                sample_id=prefix + one.get("sample_id", read.identifier),
                group_id=None if group is None else f"{prefix}g-{group}",
                response_length=one.get("response_length", read.count),
                total_length=one.get("total_length", read.count),
                loss_mask=one.get("loss_mask", read.integers),
                raw_reward=one.get("raw_reward", read.number, None),
                reward=one.get("reward", read.number, None),
                micro_batch_id=None if micro_batch is None else prefix + micro_batch,
                rollout_partition_id=partitions[0] if len(partitions) == 1 else None,
                consumer_batch_id=batches[0] if len(batches) == 1 else None,
            )
        )
        length = found[-1].response_length
        if len(found[-1].loss_mask) != length:
            raise one.error(
                "loss_mask", f"has {len(found[-1].loss_mask)} values", f"response_length = {length}"
            )
    if not found:
        raise DatasetError(f"{index.where}: no samples, expected at least one", path=index.where)
    return found


def is_loss_alone(declared: Collection[str]) -> bool:
    """Whether a capture claims the loss and nothing before it."""
    return bool(declared) and set(declared) <= set(_LOSSES)


def _without_placeholders(samples: list[SampleRecord]) -> list[SampleRecord]:
    """A capture of the loss alone knows no groups and rewards, and its writer puts zeros there."""
    groups = {one.group_id for one in samples}
    rewards = {one for sample in samples for one in (sample.raw_reward, sample.reward)}
    if rewards - {0.0, None}:
        return samples
    changes: dict[str, Any] = {"raw_reward": None, "reward": None}
    if len(groups) == 1 and str(*groups).rpartition("/")[2] == "g-0":
        changes["group_id"] = None
    return [replace(one, **changes) for one in samples]


def _refuse_twice(where: str, samples: list[SampleRecord]) -> None:
    seen: set[str] = set()
    for one in samples:
        if one.sample_id in seen:
            raise DatasetError(
                f"{where}/index.json: sample {one.sample_id.rpartition('/')[2]!r} is there twice",
                hint="Which of the two a result belongs to cannot be told: capture it again.",
            )
        seen.add(one.sample_id)


def _short_groups(samples: list[SampleRecord], size: int | None) -> tuple[str, int] | None:
    counts: dict[str, int] = {}
    for one in samples:
        if one.group_id is not None:
            counts[one.group_id] = counts.get(one.group_id, 0) + 1
    return next(((name, n) for name, n in counts.items() if size and n < size), None)


def _check_ids(records: Sequence[CaptureRecord], ids: str) -> None:
    if ids != GLOBAL:
        return
    owners: dict[str, int] = {}
    for record in records:
        if record.parallel.tensor_rank:
            continue
        for one in record.samples:
            if one.sample_id in owners:
                raise DatasetError(
                    f"sample {one.sample_id!r} is on ranks {owners[one.sample_id]} and "
                    f"{record.rank}, expected once",
                    hint="Its ids are local to their rank: import without --ids global.",
                )
            owners[one.sample_id] = record.rank


def _results(
    one: SealedRank, samples: Sequence[SampleRecord]
) -> tuple[dict[str, Any], tuple[Scalars, ...]]:
    """Token columns and scalars, from the payloads and from expected.json."""
    tokens = sum(sample.response_length for sample in samples)
    tensors: dict[str, Any] = {}
    for name, tensor in one.payloads.items():
        if name in TOKEN_COLUMNS:
            _check_tensor(f"{one.where}/payloads/{name}.pt", tensor, tokens)
            tensors[name] = tensor
    scalars = []
    for stage, results in one.expected.items():
        stage_named(stage)
        lists: dict[str, list[float]] = {}
        plain: dict[str, float] = {}
        for name in results:
            value = results.tree[name]
            if type(value) is not list:
                plain[name] = results.get(name, read.number)
                continue
            values = results.get(name, read.numbers)
            if name in TOKEN_COLUMNS:
                _take_tokens(results, name, values, tokens, tensors)
                continue
            if len(values) != len(samples):
                raise results.error(
                    name, f"has {len(values)} values", f"{len(samples)}, one for each sample"
                )
            _check_echo(results, name, values, samples)
            lists[name] = values
        if lists:
            scalars.append(Scalars(stage, lists, scope="sample"))
        if plain:
            scalars.append(Scalars(stage, plain))
    return tensors, tuple(scalars)


def _check_tensor(where: str, tensor: TensorValue, tokens: int) -> None:
    if tensor.shape != (tokens,) or tensor.dtype not in _DTYPES:
        raise DatasetError(
            f"{where}: {tensor.dtype} of shape {tensor.shape}, expected floats of shape "
            f"({tokens},): one for each response token",
            hint="The bundle is not what was written: capture it again.",
        )


def _take_tokens(
    results: Fields, name: str, values: list[float], tokens: int, tensors: dict[str, Any]
) -> None:
    """A column that expected.json lists; where it is a payload too, the two have to agree."""
    if len(values) != tokens:
        raise results.error(name, f"has {len(values)} values", f"{tokens}, one for each token")
    listed = np.array(values, np.float32)
    held = tensors.setdefault(name, TensorValue(listed, "float32"))
    same = held.dtype != "bfloat16" and np.array_equal(
        held.values.astype(np.float32), listed, equal_nan=True
    )
    if not same:
        raise results.error(name, "differs from the payload of that name", "the same values")


def _check_echo(
    results: Fields, name: str, values: list[float], samples: Sequence[SampleRecord]
) -> None:
    """Values that index.json repeats have to be the same."""
    column = _ECHOES.get(name)
    if column is None:
        return
    for value, sample in zip(values, samples, strict=True):
        other = getattr(sample, column)
        same = value == other or (other is not None and value != value and other != other)
        if other is not None and not same:
            raise results.error(
                name,
                f"has {value} for sample {sample.sample_id.rpartition('/')[2]!r}",
                f"{other}, as index.json has it",
            )


def _check_inputs(
    where: str, declared: set[str], tensors: Mapping[str, Any], kl_coef: float
) -> None:
    """Refuse a stage that is declared for recomputation and was captured without its inputs.

    A replay would look for them in the rollout, by sample ids that mean another sample there.
    """
    for stage, needed in _PAYLOADS_OF.items():
        lacking = [name for name in needed if name not in tensors]
        if lacking == ["ref_log_probs"] and not kl_coef:
            continue
        if stage in declared and lacking:
            raise DatasetError(
                f"{where}: stage {stage} is declared for recomputation and its input "
                f"{lacking[0]} is no payload, expected {', '.join(needed)}",
                hint="The bundle was captured without it, or lost it: capture it again.",
            )


_PAYLOADS_OF = {
    "advantage.kl": ("old_log_probs", "ref_log_probs"),
    "loss.policy": ("old_log_probs", "log_probs", "advantages"),
}


def _provenance(identity: Fields) -> Iterator[tuple[str, str]]:
    """What is said of a whole bundle and has no column, or not one for each sample."""
    lineage = identity.object("weight_lineage", {})
    for name in ("rollout_weight", "actor_weight"):
        yield name, lineage.get(name, read.text, "")
    for name in ("rollout_partition_ids", "consumer_batch_ids", "normalization_cohort_ids"):
        listed = identity.get(name, read.texts, [])
        if len(listed) > 1 or name == "normalization_cohort_ids":
            yield name, json.dumps(listed) if listed else ""


def _left_out(one: SealedRank) -> Iterator[str]:
    """What the files hold and the record does not."""
    for fields, known in ((one.manifest, _MANIFEST), (one.index, _INDEX)):
        odd = fields.unknown(known)
        if odd:
            yield f"{fields.where}: {', '.join(map(shown, odd[:5]))} is not known: not taken"
    samples = one.index.objects("samples")
    odd = sorted({name for sample in samples for name in sample.unknown(_SAMPLE)})
    if odd:
        yield f"{one.index.where}: {', '.join(map(shown, odd[:5]))} of samples: not taken"
    payloads = [name for name in one.payloads if name not in TOKEN_COLUMNS]
    if payloads:
        yield f"{one.where}/payloads: {', '.join(payloads)} has no column: verified, not taken"

"""Relax replay bundles of formats 1.x and 2.x, read into records of captures.

Source: the fields as Relax's replay tool writes them (relax/utils/replay/schema.py, capture.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields, shown
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.bundles.relax.cohort import read_cohort
from trajreplay.schema.bundles.relax.config import read_config
from trajreplay.schema.bundles.relax.manifest import (
    implementations,
    major_version,
    read_contracts,
    read_tolerances,
)
from trajreplay.schema.bundles.relax.results import TOKEN_COLUMNS, check_inputs, read_results
from trajreplay.schema.bundles.relax.samples import (
    DATA_SIZE,
    LABEL_HASH,
    check_ids,
    is_loss_alone,
    read_samples,
    refuse_twice,
    short_group,
    without_placeholders,
)
from trajreplay.schema.bundles.relax.seal import SealedRank
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import (
    BY_RANK,
    GLOBAL,
    IDS,
    ParallelCoordinates,
    ProducerInfo,
    rank_prefix,
)

_MANIFEST = (
    *("format_version", "bundle_id", "producer", "stage_contracts", "payloads"),
    *("comparison_policy", "redaction"),
)
_INDEX = ("bundle_id", "identity", "samples", "config")
_SAMPLE = (
    *("sample_id", "group_index", "response_length", "total_length", "loss_mask"),
    *("raw_reward", "reward", "label_hash", "micro_batch_id"),
)


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
    check_ids(records, ids)
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
    major = major_version(one.manifest)
    bundle_id = one.manifest.get("bundle_id", read.identifier)
    identity = one.index.object("identity")
    rollout_id, step_id = _anchor(identity)
    contracts = dict(read_contracts(one.manifest, major))
    declared = {name for name, contract in contracts.items() if contract.capability == "recompute"}
    prefix = "" if ids == GLOBAL else place.prefix
    samples = read_samples(one.index, identity, major, prefix)
    if is_loss_alone(declared):
        samples = without_placeholders(samples)
    refuse_twice(one.where, samples)
    tensors, scalars = read_results(one, samples)
    config, unstated = read_config(
        one.index.object("config"), with_reward=major == 1 and "reward.post_process" in declared
    )
    check_inputs(one.where, declared, tensors, config.kl_coef)
    short = short_group(samples, config.n_samples_per_prompt)
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
        "implementation": implementations(one.manifest),
        "unstated": ", ".join(unstated),
        **dict(_provenance(identity)),
        LABEL_HASH: "not taken" if _has_hashes(one) else "",
    }
    told = identity.object("rank", {}).get("dp", read.count, 0)
    if told and told != place.parallel.data_size:
        facts[DATA_SIZE] = str(told)
    producer = one.manifest.object("producer", {})
    return CaptureRecord(
        run_id=run_id or _run_of(bundle_id, rollout_id, step_id),
        rollout_id=rollout_id,
        step_id=step_id,
        rank=one.rank,
        expected_ranks=one.expected_ranks,
        settings=config,
        samples=samples,
        tensors=tensors,
        scalars=scalars,
        stages=tuple(contracts.values()),
        tolerances=dict(read_tolerances(one.manifest)),
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


def _provenance(identity: Fields) -> Iterator[tuple[str, str]]:
    """What is said of a whole bundle and has no column, or not one for each sample."""
    lineage = identity.object("weight_lineage", {})
    for name in ("rollout_weight", "actor_weight"):
        yield name, lineage.get(name, read.text, "")
    for name in ("rollout_partition_ids", "consumer_batch_ids", "normalization_cohort_ids"):
        listed = identity.get(name, read.texts, [])
        if len(listed) > 1 or name == "normalization_cohort_ids":
            yield name, json.dumps(listed) if listed else ""


def _has_hashes(one: SealedRank) -> bool:
    return any(row.get(LABEL_HASH) is not None for row in one.index.tree["samples"])


def _left_out(one: SealedRank) -> Iterator[str]:
    """What the files hold and the record does not."""
    if _has_hashes(one):
        yield f"{one.index.where}: label_hash of samples has no column: not taken"
    for fields, known in ((one.manifest, _MANIFEST), (one.index, _INDEX)):
        odd = fields.unknown(known)
        if odd:
            yield f"{fields.where}: {', '.join(map(shown, odd[:5]))} is not known: not taken"
    odd = sorted(set().union(*one.index.tree["samples"]) - set(_SAMPLE))
    if odd:
        yield f"{one.index.where}: {', '.join(map(shown, odd[:5]))} of samples: not taken"
    payloads = [name for name in one.payloads if name not in TOKEN_COLUMNS]
    if payloads:
        yield f"{one.where}/payloads: {', '.join(payloads)} has no column: verified, not taken"

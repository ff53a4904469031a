"""What the files of a Relax replay bundle say of a capture: manifest, index and results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trajreplay.schema.bundles.record import CaptureRecord, Scalars
from trajreplay.schema.bundles.relax.config import write_config
from trajreplay.schema.bundles.relax.samples import DATA_SIZE, is_loss_alone
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.identity import own_prefix, rank_prefix
from trajreplay.schema.recompute import RecomputeConfig

FORMAT_VERSION = "1.0.0"
_GROUP = re.compile(r"g-(0|[1-9][0-9]{0,8})")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")


def group_numbers(records: Sequence[CaptureRecord], notes: dict[str, None]) -> dict[str, int]:
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


def manifest_tree(
    record: CaptureRecord, bundle_id: str, payloads: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest, with what is said of each payload."""
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


def index_tree(
    record: CaptureRecord,
    bundle_id: str,
    groups: Mapping[str, int],
    declared: set[str],
    where: str,
) -> dict[str, Any]:
    """The index: identity, settings and samples.

    Args:
        record: The capture.
        bundle_id: The bundle.
        groups: The number of each group.
        declared: Stages that are recomputed.
        where: The capture, for messages.

    Raises:
        CaptureError: A bundle cannot say its settings.
    """
    prefix = _prefix(record)
    return {
        "bundle_id": bundle_id,
        "identity": _identity(record, groups, prefix),
        "config": write_config(_settings(record, where), "reward.post_process" in declared),
        "samples": list(_samples(record, groups, prefix, loss_alone=is_loss_alone(declared))),
    }


def expected_tree(record: CaptureRecord) -> dict[str, Any]:
    """The recorded results that a bundle has a place for, by stage.

    What is recorded as it means it goes before what it means after a conversion.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in record.scalars:
        if has_place(one):
            found.setdefault(one.stage, {}).update(one.fields)
    for one in record.scalars:
        for name, value in sums_of(one, len(record.samples)).items():
            found.setdefault(one.stage, {}).setdefault(name, value)
    return found


def has_place(one: Scalars) -> bool:
    """Whether a bundle means the same by it: a scalar of a sample, or the plain sum of a rank."""
    return one.scope == "sample" or (one.scope, one.reduction, one.scale) == ("rank", "sum", 1.0)


def sums_of(one: Scalars, samples: int) -> dict[str, float]:
    """The plain sums over a rank that follow from its means, or from sums with a factor inside.

    A mean is the sum over its divisor, which is stated or the number of samples.
    """
    if one.scope != "rank" or one.reduction not in ("sum", "mean") or has_place(one):
        return {}
    divisors = one.denominator or {}
    return {
        name: value / one.scale * (divisors.get(name, samples) if one.reduction == "mean" else 1)
        for name, value in one.fields.items()
    }


def step_tree(record: CaptureRecord) -> dict[str, Any]:
    """The optimizer step that a capture is of."""
    return {"rollout_id": record.rollout_id, "step_id": record.step_id}


def _prefix(record: CaptureRecord) -> str:
    """What the import put before the ids: the first rank of its tensor-parallel group."""
    if not own_prefix(record.producer.to_json(), record.rank):
        return ""
    place = record.expected_ranks.index(record.rank) - record.parallel.tensor_rank
    return rank_prefix(record.expected_ranks[place])


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
    told = extra.get(DATA_SIZE, "")

    def listed(field: str, fact: str = "") -> list[str]:
        held = [getattr(one, field) for one in record.samples]
        mine = dict.fromkeys(one.removeprefix(prefix) for one in held if one is not None)
        return list(mine) or json.loads(extra.get(fact, "[]"))

    semantic = dict.fromkeys(one.group_id for one in record.samples if one.group_id is not None)
    return {
        "actor_step_id": None if record.step_id is None else step_tree(record),
        "rollout_id": record.rollout_id if record.step_id is None else None,
        "rollout_partition_ids": listed("rollout_partition_id", "rollout_partition_ids"),
        "consumer_batch_ids": listed("consumer_batch_id", "consumer_batch_ids"),
        "micro_batch_ids": listed("micro_batch_id"),
        "semantic_group_ids": [f"g-{groups[one]}" for one in semantic],
        "normalization_cohort_ids": json.loads(extra.get("normalization_cohort_ids", "[]")),
        "weight_lineage": {name: extra.get(name) for name in ("rollout_weight", "actor_weight")},
        "rank": {
            "dp": int(told) if _COUNT.fullmatch(told) else place.data_size,
            "tp": place.tensor_size,
            "pp": place.pipeline_size,
            "cp": place.context_size,
        },
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

"""The samples that a Relax bundle names, and what their ids mean beside those of other ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import GLOBAL
from trajreplay.schema.records import SampleRecord, Values

# Facts of a producer: that its samples had hashes of labels, and what it called its data size.
LABEL_HASH, DATA_SIZE = "label_hash", "dp"
_LOSSES = ("loss.policy", "loss.value")


def read_samples(index: Fields, identity: Fields, major: int, prefix: str) -> list[SampleRecord]:
    """The samples of one rank, their ids with a prefix.

    Raises:
        DatasetError: There is none, or a field is missing or of another length than it should be.
    """
    rows = index.rows("samples")
    if not len(rows):
        raise DatasetError(f"{index.where}: no samples, expected at least one", path=index.where)
    for name in ("raw_reward", "reward") if major == 1 else ():
        for row in rows.lacking(name):
            raise rows.row(row).error(name, "is missing", "a value or null in format 1")
    lengths = rows.get("response_length", read.count)
    masks = rows.get("loss_mask", _mask)
    for row, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
        if len(mask) != length:
            raise rows.row(row).error(
                "loss_mask", f"has {len(mask)} values", f"response_length = {length}"
            )
    partition, batch = (
        listed[0] if len(listed) == 1 else None
        for name in ("rollout_partition_ids", "consumer_batch_ids")
        for listed in [identity.get(name, read.texts, [])]
    )
    columns = zip(
        [prefix + one for one in rows.get("sample_id", read.identifier)],
        lengths,
        rows.get("total_length", read.count),
        masks,
        [
            f"{prefix}g-{one}" if one >= 0 else None
            for one in rows.get("group_index", read.count, -1)
        ],
        rows.get("raw_reward", read.number, None),
        rows.get("reward", read.number, None),
        [prefix + one if one else None for one in rows.get("micro_batch_id", read.identifier, "")],
        strict=True,
    )
    return [
        SampleRecord(
            sample_id=sample,
            response_length=length,
            total_length=total,
            loss_mask=mask,
            group_id=group,
            raw_reward=raw_reward,
            reward=reward,
            micro_batch_id=micro_batch,
            rollout_partition_id=partition,
            consumer_batch_id=batch,
        )
        for sample, length, total, mask, group, raw_reward, reward, micro_batch in columns
    ]


def _mask(value: Any) -> Values:
    """The array that a list of 0 and 1 was read as, or an empty list; others are refused here."""
    if isinstance(value, np.ndarray):
        taken: Values = value
        return taken
    found = read.integers(value)
    if not {0, 1}.issuperset(found):
        raise ValueError("a list of 0 and 1")
    return found


def is_loss_alone(declared: Collection[str]) -> bool:
    """Whether a capture claims the loss and nothing before it."""
    return bool(declared) and set(declared) <= set(_LOSSES)


def without_placeholders(samples: list[SampleRecord]) -> list[SampleRecord]:
    """A capture of the loss alone knows no groups and rewards, and its writer puts zeros there."""
    groups = {one.group_id for one in samples}
    rewards = {one for sample in samples for one in (sample.raw_reward, sample.reward)}
    if rewards - {0.0, None}:
        return samples
    changes: dict[str, Any] = {"raw_reward": None, "reward": None}
    if len(groups) == 1 and str(*groups).rpartition("/")[2] == "g-0":
        changes["group_id"] = None
    return [replace(one, **changes) for one in samples]


def refuse_twice(where: str, samples: list[SampleRecord]) -> None:
    """Refuse a sample id that is there twice."""
    seen: set[str] = set()
    for one in samples:
        if one.sample_id in seen:
            raise DatasetError(
                f"{where}/index.json: sample {one.sample_id.rpartition('/')[2]!r} is there twice",
                hint="Which of the two a result belongs to cannot be told: capture it again.",
            )
        seen.add(one.sample_id)


def short_group(samples: list[SampleRecord], size: int | None) -> tuple[str, int] | None:
    """The first group of fewer samples than stated, and how many it has; None without one."""
    counts: dict[str, int] = {}
    for one in samples:
        if one.group_id is not None:
            counts[one.group_id] = counts.get(one.group_id, 0) + 1
    return next(((name, n) for name, n in counts.items() if size and n < size), None)


def check_ids(records: Sequence[CaptureRecord], ids: str) -> None:
    """Refuse ids that are said to be global and name two samples, copies apart."""
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

"""The samples that a Relax bundle names, and what their ids mean beside those of other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import GLOBAL
from trajreplay.schema.records import SampleLists, Values, values_of

# Facts of a producer: that its samples had hashes of labels, and what it called its data size.
LABEL_HASH, DATA_SIZE = "label_hash", "dp"
_LOSSES = ("loss.policy", "loss.value")


def read_samples(index: Fields, identity: Fields, major: int, prefix: str) -> SampleLists:
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
    batches = rows.get("micro_batch_id", read.identifier, "")
    return SampleLists(
        len(rows),
        {
            "sample_id": [prefix + one for one in rows.get("sample_id", read.identifier)],
            "response_length": lengths,
            "total_length": rows.get("total_length", read.count),
            "loss_mask": masks,
            "group_id": [
                f"{prefix}g-{one}" if one >= 0 else None
                for one in rows.get("group_index", read.count, -1)
            ],
            "raw_reward": rows.get("raw_reward", read.number, None),
            "reward": rows.get("reward", read.number, None),
            "micro_batch_id": [prefix + one if one else None for one in batches],
            "rollout_partition_id": [partition] * len(rows),
            "consumer_batch_id": [batch] * len(rows),
        },
    )


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


def without_placeholders(samples: SampleLists) -> SampleLists:
    """A capture of the loss alone knows no groups and rewards, and its writer puts zeros there."""
    groups = set(samples.values("group_id"))
    rewards = {*samples.values("raw_reward"), *samples.values("reward")}
    if rewards - {0.0, None}:
        return samples
    nothing: list[Any] = [None] * len(samples)
    samples = samples.changed(raw_reward=nothing, reward=nothing)
    if len(groups) == 1 and str(*groups).rpartition("/")[2] == "g-0":
        return samples.changed(group_id=nothing)
    return samples


def refuse_twice(where: str, samples: SampleLists) -> None:
    """Refuse a sample id that is there twice."""
    counts = Counter(samples.values("sample_id"))
    twice = next((name for name, count in counts.items() if count > 1), None)
    if twice is not None:
        raise DatasetError(
            f"{where}/index.json: sample {twice.rpartition('/')[2]!r} is there twice",
            hint="Which of the two a result belongs to cannot be told: capture it again.",
        )


def short_group(samples: SampleLists, size: int | None) -> tuple[str, int] | None:
    """The first group of fewer samples than stated, and how many it has; None without one."""
    counts = Counter(name for name in samples.values("group_id") if name is not None)
    return next(((name, n) for name, n in counts.items() if size and n < size), None)


def check_ids(records: Sequence[CaptureRecord], ids: str) -> None:
    """Refuse ids that are said to be global and name two samples, copies apart."""
    if ids != GLOBAL:
        return
    owners: dict[str, int] = {}
    for record in records:
        if record.parallel.tensor_rank:
            continue
        for name in values_of(record.samples, "sample_id"):
            if name in owners:
                raise DatasetError(
                    f"sample {name!r} is on ranks {owners[name]} and {record.rank}, expected once",
                    hint="Its ids are local to their rank: import without --ids global.",
                )
            owners[name] = record.rank

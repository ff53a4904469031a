"""What captures hold and a Relax replay bundle has no place for, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.bundles.relax.describe import has_place, sums_of
from trajreplay.schema.bundles.relax.results import TOKEN_COLUMNS
from trajreplay.schema.bundles.relax.samples import LABEL_HASH
from trajreplay.schema.records import SampleRecord

_OF_ALL = ("rollout_partition_id", "consumer_batch_id", "source_attempt")
# What a bundle holds of a sample; of the last four what is the same of all, or the capture's own.
_HELD = (
    *("sample_id", "group_id", "group_index", "response_length", "total_length", "loss_mask"),
    *("raw_reward", "reward", "micro_batch_id"),
    *("source_rollout_id", *_OF_ALL),
)


def converted(record: CaptureRecord) -> Iterator[str]:
    """Which results of a capture are given in the way of a bundle, and were recorded in another."""
    for stage in dict.fromkeys(one.stage for one in record.scalars):
        names = dict.fromkeys(
            name
            for one in record.scalars
            if one.stage == stage
            for name in sums_of(one, len(record.samples))
        )
        if names:
            yield (
                f"{', '.join(names)} of {stage} are sums over each rank in a bundle: they follow "
                "from the means, or the factors, that were recorded"
            )


def left_out(records: Sequence[CaptureRecord], bundle_id: str) -> Iterator[str]:
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
        if not has_place(one) and not sums_of(one, 1):
            factor = "" if one.scale == 1.0 else f" times {one.scale:g}"
            of = f"at scope {one.scope} by {one.reduction or 'an unstated reduction'}{factor}"
            scalars.setdefault(f"{one.stage} {of}", {}).update(dict.fromkeys(one.fields))
    for of, fields in scalars.items():
        yield f"{', '.join(fields)} of {of}"
    for name in SampleRecord.__dataclass_fields__:
        if name not in _HELD and any(getattr(one, name) is not None for one in record.samples):
            yield name
    for name in _OF_ALL:
        if len({getattr(one, name) for one in record.samples}) > 1:
            yield f"which {name} a sample is of"
    if any(_foreign(one, record) for one in record.samples):
        yield "which rollout a sample is from"
    yield from (name for name in record.tensors if name not in TOKEN_COLUMNS)
    if record.reward_dtype != CaptureRecord.reward_dtype:
        yield f"that rewards were computed in {record.reward_dtype}"
    if record.producer.extra.get(LABEL_HASH):
        yield LABEL_HASH
    if record.origins:
        yield f"where {', '.join(record.origins)} came from"


def _foreign(one: SampleRecord, record: CaptureRecord) -> bool:
    return one.source_rollout_id not in (None, record.rollout_id)

"""Captures made of the records that readers of files give: every field handed over, and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.schema.bundles.record import CaptureRecord, EventRecord
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.identity import make_key
from trajreplay.schema.store import Store
from trajreplay.writer import CaptureBuilder, Event
from trajreplay.writer.commit import Prepared
from trajreplay.writer.events import prepare_events


def builders_of(
    store: Store, records: Sequence[CaptureRecord | EventRecord], options: ImportOptions
) -> list[CaptureBuilder | EventBlock]:
    """The captures of one source, all of them known to be whole.

    Args:
        store: The lake.
        records: What its reader gave.
        options: What is said beside the files.

    Raises:
        CaptureError: One cannot be captured, or two would be committed in one place.
    """
    builders: list[CaptureBuilder | EventBlock] = []
    for record in records:
        if isinstance(record, EventRecord):
            builders.append(EventBlock(store, record, options.attempt))
            continue
        builder = _builder(store, record, options)
        _fill(builder, record)
        builder.check()
        builders.append(builder)
    _check_keys(builders)
    return builders


def _check_keys(builders: Sequence[CaptureBuilder | EventBlock]) -> None:
    """Refuse captures of one source of which one would be committed in the place of another."""
    counts = Counter(one.key for one in builders)
    twice = [f"{count} captures of {key}" for key, count in counts.items() if count > 1]
    if twice:
        more = f" and {len(twice) - 10} more" if len(twice) > 10 else ""
        raise CaptureError(
            f"{'; '.join(twice[:10])}{more}: expected one of each",
            hint="Ranks that say the same of themselves are not told apart: nothing is imported.",
        )


class EventBlock:
    """The events of one rank as a capture, as a builder has its samples."""

    def __init__(self, store: Store, record: EventRecord, attempt: int) -> None:
        self.key = make_key(record.run_id, attempt, "events", None, None, record.rank)
        self._store, self._record = store, record

    def prepare(self) -> Prepared:
        """What is to be committed."""
        record = self._record
        events = [Event(**vars(one)) for one in record.events]
        return prepare_events(self._store, self.key, events, record.expected_ranks, record.producer)


def _builder(store: Store, record: CaptureRecord, options: ImportOptions) -> CaptureBuilder:
    return CaptureBuilder(
        store,
        run_id=record.run_id,
        rollout_id=record.rollout_id,
        step_id=record.step_id,
        rank=record.rank,
        expected_ranks=record.expected_ranks,
        settings=record.settings,
        attempt=options.attempt,
        producer=record.producer,
        stages=record.stages,
        redaction={**options.redaction, **record.redaction},
        parallel=record.parallel,
        tolerances=record.tolerances,
    )


def _fill(builder: CaptureBuilder, record: CaptureRecord) -> None:
    builder.samples(record.samples, reward_dtype=record.reward_dtype)
    for name, values in record.tensors.items():
        origin = record.origins.get(name)
        about = vars(origin) if origin is not None else {}
        builder.tensor(name, _tensor(values), **about)
    for name, values in record.routes.items():
        builder.routes(name, values)
    for one in record.scalars:
        builder.expected(
            one.stage,
            scope=one.scope,
            reduction=one.reduction,
            scale=one.scale,
            denominator=one.denominator,
            micro_batch_id=one.micro_batch_id,
            **one.fields,
        )


def _tensor(values: Any) -> Any:
    """Values as the builder takes them; only torch has a dtype for the bits of bfloat16."""
    if isinstance(values, list | tuple):
        return [None if one is None else _tensor(one) for one in values]
    if not isinstance(values, TensorValue):
        return values
    if values.dtype != "bfloat16":
        return values.values
    import torch

    return torch.from_numpy(values.values.copy()).view(torch.bfloat16)

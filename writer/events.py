"""Captures of events: heartbeats, clean ends, the ledger of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.identity import CaptureKey, ParallelCoordinates, ProducerInfo
from trajreplay.schema.policy import Redaction
from trajreplay.schema.settings import Settings
from trajreplay.schema.store import Store, now_us
from trajreplay.schema.tables import EVENTS
from trajreplay.writer.attempts import reserve_attempt
from trajreplay.writer.commit import Prepared, TableRows, commit_rows, prepare_rows
from trajreplay.writer.draft import make_draft


@dataclass(frozen=True)
class Event:
    """One event.

    Args:
        event: What happened: heartbeat, terminal, generated, scored, filtered, consumed, ...
        detail: A JSON object; of a heartbeat or terminal as `schema.events.dump_detail` makes it.
        sample_id: The sample concerned.
        reason: Why, for a filtered sample.
        time_us: When, microseconds since 1970; now if omitted.
    """

    event: str
    detail: str | None = None
    sample_id: str | None = None
    reason: str | None = None
    time_us: int | None = None


def commit_events(
    store: Store,
    key: CaptureKey,
    events: Sequence[Event],
    *,
    expected_ranks: Sequence[int] | None = None,
    producer: ProducerInfo | None = None,
) -> Entry:
    """Commit events, in their order, as one capture.

    Args:
        store: The lake.
        key: Their capture, of kind events; rollout and step where they are of one.
        events: At least one.
        expected_ranks: Ranks that capture events of the same place; this one if omitted.
        producer: The program that captures.

    Returns:
        The entry in the lake: this one, or an equal one that was there.

    Raises:
        CaptureError: There is no event, or the key is taken by other content.
        SchemaError: The key is of another kind.
    """
    return commit_rows(store, prepare_events(store, key, events, expected_ranks, producer))


def prepare_events(
    store: Store,
    key: CaptureKey,
    events: Sequence[Event],
    expected_ranks: Sequence[int] | None,
    producer: ProducerInfo | None,
) -> Prepared:
    """Events as a capture, of which nothing is written but the record of its attempt.

    Args:
        store: As of `commit_events`; likewise the rest, and what is raised.
        key: Their capture.
        events: At least one.
        expected_ranks: Ranks that capture events of the same place.
        producer: The program that captures.
    """
    if key.kind != "events" or not events:
        raise CaptureError(
            f"capture of {key}: {len(events)} events of kind {key.kind}, expected some of events"
        )
    record = reserve_attempt(store, key.run_id, key.attempt, None)
    draft = make_draft(
        key,
        expected_ranks or (key.rank,),
        Settings(),
        producer=producer or ProducerInfo(),
        parallel=ParallelCoordinates(),
        stages=(),
        redaction=Redaction({}),
        owner=True,
        cohort_size=None,
        tolerances={},
    )
    now = now_us()
    values: dict[str, list[Any]] = {
        name: [getattr(one, name) for one in events]
        for name in ("event", "detail", "sample_id", "reason")
    }
    values["time"] = [now if one.time_us is None else one.time_us for one in events]
    columns: dict[str, pa.Array] = {
        name: pa.repeat(pa.scalar(getattr(key, name), EVENTS[name].type), len(events))
        for name in EVENTS.key
        if name != "seq"
    }
    columns["seq"] = pa.array(np.arange(len(events), dtype=np.int64))
    columns |= {
        name: pa.array(found, EVENTS[name].type)
        for name, found in values.items()
        if any(value is not None for value in found)
    }
    entry = replace(draft, resumed_from=record.resumed_from)
    return prepare_rows(entry, TableRows(EVENTS, columns, len(events)))

"""Events that a recorder commits: heartbeats under a free name, and fates beside their rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.capture.writing.handoff import Handoff
from trajreplay.schema.errors import CaptureError

if TYPE_CHECKING:
    from trajreplay.schema.identity import CaptureKey
    from trajreplay.schema.store import Store
    from trajreplay.writer.events import Event


def commit_beside(store: Store, events: Sequence[Event], identity: Mapping[str, Any]) -> None:
    """Commit events under their name, or the next one that is free.

    They are named after the first of several steps, which a step that is tried again, or another
    recorder of this attempt, may have named before.
    """
    from trajreplay.schema.layout import entry_path
    from trajreplay.writer.events import commit_events

    key: CaptureKey = identity["key"]
    given = {name: one for name, one in identity.items() if name != "key"}
    while True:
        try:
            commit_events(store, key, events, **given)
            return
        except CaptureError:
            if key.step_id is None or not store.exists(entry_path(key)):
                raise
        key = key._replace(step_id=key.step_id + 1)


def note_fates(store: Store, key: CaptureKey, handoff: Handoff) -> None:
    """Commit the ledger of a rollout, before the rollout itself."""
    from trajreplay.writer.events import Event, commit_events

    assert handoff.pending is not None
    events = [
        Event(fate, sample_id=sample_id, reason=reason, time_us=time_us)
        for fate, sample_id, reason, time_us in handoff.pending.ledger.rows
    ]
    if events:
        commit_events(
            store,
            key._replace(kind="events"),
            events,
            expected_ranks=handoff.identity["expected_ranks"],
            producer=handoff.identity["producer"],
        )

"""Captures of events: heartbeats and ledger entries come back as they were committed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay import CaptureError, Lake
from trajreplay.schema.events import dump_detail
from trajreplay.schema.identity import make_key
from trajreplay.schema.lakefile import open_lake
from trajreplay.writer import Event, commit_events

KEY = make_key("r", 0, "events", 3, 1, 2)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


@given(
    st.lists(
        st.builds(
            Event,
            event=st.sampled_from(["heartbeat", "terminal", "filtered"]),
            detail=st.none() | TEXT,
            sample_id=st.none() | TEXT,
            reason=st.none() | TEXT,
            time_us=st.integers(0, 2**50),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_events_come_back_in_their_order(
    tmp_path_factory: pytest.TempPathFactory, events: list[Event]
) -> None:
    lake = Lake.create(tmp_path_factory.mktemp("events") / "lake")
    commit_events(open_lake(lake.path), KEY, events)
    rows = (
        Lake.open(lake.path)
        .sql(
            "select event, detail, sample_id, reason, epoch_us(time) as us from events order by seq"
        )
        .arrow()
        .to_pylist()
    )
    assert [tuple(row.values()) for row in rows] == [
        (one.event, one.detail, one.sample_id, one.reason, one.time_us) for one in events
    ]
    assert Lake.open(lake.path).validate(deep=True).ok


def test_the_same_events_again_are_a_retry_and_others_a_conflict(tmp_path: Path) -> None:
    store = open_lake(Lake.create(tmp_path / "lake").path)
    beat = Event("heartbeat", dump_detail("heartbeat", {"step": 1}), time_us=1)
    first = commit_events(store, KEY, [beat])
    assert commit_events(store, KEY, [beat]).created_us == first.created_us
    with pytest.raises(CaptureError, match="other content"):
        commit_events(store, KEY, [beat, beat])


def test_no_event_is_no_capture(tmp_path: Path) -> None:
    store = open_lake(Lake.create(tmp_path / "lake").path)
    with pytest.raises(CaptureError, match="0 events"):
        commit_events(store, KEY, [])
    with pytest.raises(CaptureError, match="kind rollout"):
        commit_events(store, make_key("r", 0, "rollout", 3, None, 2), [Event("heartbeat")])

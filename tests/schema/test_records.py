"""Samples held as lists are the samples that they would be one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay import SampleRecord
from trajreplay.schema.records import SampleLists, values_of

RECORDS = st.lists(
    st.builds(
        SampleRecord,
        sample_id=st.text(max_size=3),
        response_length=st.integers(0, 3),
        total_length=st.integers(0, 5),
        loss_mask=st.lists(st.integers(0, 1), max_size=3),
        group_id=st.none() | st.text(max_size=2),
        reward=st.none() | st.floats(allow_nan=False),
    )
)
NAMES = ("sample_id", "response_length", "total_length", "loss_mask", "group_id", "reward")


def lists(records: list[SampleRecord]) -> SampleLists:
    fields = {name: [getattr(one, name) for one in records] for name in NAMES}
    return SampleLists(len(records), fields)


@given(RECORDS)
def test_records_are_those_that_the_lists_hold(records: list[SampleRecord]) -> None:
    held = lists(records)
    assert list(held) == records
    assert len(held) == len(records)
    assert held[1:] == records[1:]
    for name in (*NAMES, "raw_reward", "prompt"):
        assert values_of(held, name) == values_of(records, name)
    assert held.has("reward")
    assert not held.has("prompt")


@given(RECORDS)
def test_some_fields_change_and_the_others_stay(records: list[SampleRecord]) -> None:
    changed = lists(records).changed(reward=[1.0] * len(records), label=["x"] * len(records))
    assert values_of(changed, "reward") == [1.0] * len(records)
    assert values_of(changed, "label") == ["x"] * len(records)
    assert values_of(changed, "sample_id") == [one.sample_id for one in records]


def test_lists_of_other_lengths_are_a_mistake_and_a_row_beyond_them_is_none() -> None:
    with pytest.raises(ValueError, match="lists of other lengths than 2"):
        SampleLists(2, {"sample_id": ["a"]})
    with pytest.raises(IndexError):
        SampleLists(0, {})[0]

"""Selections of rollouts and steps: what they choose, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay import SchemaError
from trajreplay.capture import Selection

NUMBERS = st.integers(0, 60)


@given(rollout=NUMBERS, step=NUMBERS)
def test_everything_is_captured_where_nothing_is_chosen(rollout: int, step: int) -> None:
    chosen = Selection()
    assert chosen.wants_rollout(rollout)
    assert chosen.wants_step(rollout, step)


@given(low=NUMBERS, size=st.integers(0, 5), rollout=NUMBERS, step=NUMBERS)
def test_a_range_holds_both_of_its_ends(low: int, size: int, rollout: int, step: int) -> None:
    chosen = Selection(steps=f"{low}-{low + size}:{step}, 99:{step}")
    assert chosen.wants_step(rollout, step) == (low <= rollout <= low + size)
    assert not chosen.wants_step(rollout, step + 1)


@given(every=st.integers(1, 9), rollout=NUMBERS)
def test_every_nth_begins_at_zero(every: int, rollout: int) -> None:
    assert Selection(rollouts=f"every:{every}").wants_rollout(rollout) == (rollout % every == 0)


@given(rollout=NUMBERS, step=NUMBERS)
def test_what_is_not_chosen_follows_the_other(rollout: int, step: int) -> None:
    by_step = Selection(steps="3:1,7-9:all")
    assert not by_step.wants_rollout(rollout)  # by its number: its consumer decides
    assert by_step.by_consumer
    by_rollout = Selection(rollouts="3,7-9")
    assert by_rollout.wants_step(rollout, step) == (rollout in (3, 7, 8, 9))
    both = Selection(steps="3:1", rollouts="5")
    assert not both.by_consumer
    assert not by_rollout.by_consumer
    assert [both.wants_rollout(5), both.wants_rollout(3)] == [True, False]


@pytest.mark.parametrize(
    "text", ["", "x", "3:", ":3", "3-", "5-3", "-1", "3;4", "every:0", "every:x", "3:every:2", "³"]
)
def test_what_has_no_such_form_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="the steps to capture are"):
        Selection(steps=text)
    with pytest.raises(SchemaError, match="the rollouts to capture are"):
        Selection(rollouts=f"3,{text}")


def test_a_rollout_has_no_step() -> None:
    with pytest.raises(SchemaError, match=r"the rollouts to capture are '3:0'"):
        Selection(rollouts="3:0")

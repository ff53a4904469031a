"""What a gate counts on: the detail of heartbeats and of the clean end."""

import math

import pytest

from trajreplay.schema import SchemaError
from trajreplay.schema.events import FIELDS_OF_EVENT, HEARTBEAT, TERMINAL, dump_detail, load_detail


@pytest.mark.parametrize("event", [HEARTBEAT, TERMINAL])
def test_every_declared_field_comes_back_as_it_was(event: str) -> None:
    values = {one.name: index + 0.5 for index, one in enumerate(FIELDS_OF_EVENT[event])}
    assert load_detail(dump_detail(event, values)) == values


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0.0, 1e300, -0.001, None])
def test_numbers_come_back_exactly(value: float | None) -> None:
    assert load_detail(dump_detail(HEARTBEAT, {"loss": value})) == {"loss": value}


def test_nan_comes_back_as_nan() -> None:
    assert math.isnan(load_detail(dump_detail(HEARTBEAT, {"loss": math.nan}))["loss"])


def test_an_undeclared_field_is_refused() -> None:
    with pytest.raises(SchemaError, match="no field 'los', expected one of step"):
        dump_detail(HEARTBEAT, {"los": 1.0})


@pytest.mark.parametrize("text", ["{", "[1]", '{"loss": NaN}', "[" * 100_000])
def test_a_detail_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="the detail of an event is"):
        load_detail(text)


def test_an_event_without_detail_says_nothing() -> None:
    assert load_detail(None) == {}

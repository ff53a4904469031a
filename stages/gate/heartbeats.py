"""What several ranks told of the steps of a run, and of its end, in the events of the lake."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trajreplay.query import Catalog
from trajreplay.query.files.reading import read_columns
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.events import (
    HEARTBEAT,
    HEARTBEAT_FIELDS,
    TERMINAL,
    EventField,
    load_detail,
)
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.tables import EVENTS

Values = dict[str, Any]
_IDENTITY = ("step", "rollout_id", "step_id")


def read_events(catalog: Catalog, key: CaptureKey) -> Iterator[tuple[str, Values]]:
    """The heartbeats and terminal records of one capture of events.

    Yields:
        The event's name, and its fields with the rollout and step of the capture.

    Raises:
        DatasetError: The capture is damaged, or a detail is no JSON object.
    """
    entry = catalog.entry(key)
    rows = read_columns(catalog.store, entry, EVENTS, ["event", "detail"])
    for event, detail in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        if event in (HEARTBEAT, TERMINAL):
            try:
                values = load_detail(detail)
            except SchemaError as error:
                raise DatasetError(f"events of {key}: {error.message}") from error
            where = {"rollout_id": key.rollout_id, "step_id": key.step_id}
            yield event, {name: one for name, one in where.items() if one is not None} | values


def over_ranks(told: Sequence[Values], *, silent: int = 0) -> Values:
    """What several ranks told of one step, as one; a value that some of them lack is left out.

    Args:
        told: What each rank told.
        silent: How many more ranks there are, which told nothing of this step.
    """
    whole = [*told, *({} for _ in range(silent))]
    return {
        one.name: found for one in HEARTBEAT_FIELDS if (found := _one_field(one, whole)) is not None
    }


def _one_field(one: EventField, told: Sequence[Values]) -> Any:
    values = [values[one.name] for values in told if values.get(one.name) is not None]
    if not values:
        return None
    if one.name in _IDENTITY:
        return values[0]
    if len(values) < len(told):
        return None  # a rank that did not tell may hold the worst value
    numbers = [number_of(value) for value in values]
    if any(number is None or not math.isfinite(number) for number in numbers):
        return math.nan
    known = [float(number) for number in numbers if number is not None]
    if len(known) == 1 or one.over_ranks == "same":
        return known[0] if len(set(known)) == 1 else math.nan
    if one.over_ranks == "largest":
        return max(known)
    if one.over_ranks == "sum":
        return total(known)
    if one.over_ranks == "mean":
        return total(known) / len(known)
    weights = [number_of(values.get("valid_tokens")) for values in told]
    if any(not weight for weight in weights):
        return None
    weighted = [x * (w or 0) for x, w in zip(known, weights, strict=True)]
    tokens = total([w or 0 for w in weights])
    return total(weighted) / tokens if tokens else math.nan


def total(values: Sequence[float]) -> float:
    """The sum, rounded once; infinite or NaN where no float can be it."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond all floats, or infinities of both signs
        return sum(values)


def number_of(value: Any) -> float | None:
    """A recorded number; None if there is none, NaN if it is something else.

    >>> number_of(3), number_of(-(10**400)), number_of("3")
    (3.0, -inf, nan)
    """
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def is_number(value: Any) -> bool:
    """Whether it is a number that a float can be, and no bool."""
    number = number_of(value)
    return number is not None and math.isfinite(number)

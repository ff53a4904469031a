"""One line of a router-replay trace of NeMo-RL, read strictly and within bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trajreplay.schema.bundles.r3.fields import Fields, RecordError
from trajreplay.schema.bundles.r3.records import (
    ACTION,
    ASSIGNMENT,
    EVENTS,
    FETCH,
    PAYLOAD,
    SHARD,
    VERIFY,
    Action,
    Assignment,
    Origin,
    PayloadSample,
    Shard,
    TraceRecord,
    Verification,
)
from trajreplay.schema.bundles.strict_json import load_object
from trajreplay.schema.errors import DatasetError

MAX_LINE_BYTES = 1 << 20
MAX_DEPTH = 8


def parse_record(line: bytes, file: str, number: int, seen: dict[Any, Any]) -> TraceRecord:
    """Read one line of a trace.

    Args:
        line: Its bytes, without the newline.
        file: Name of the file.
        number: Of the line, from 1.
        seen: Tensors met before, so that equal ones are held once; pass the same for all lines.

    Raises:
        RecordError: It is no JSON object of a known event with the fields of that event.
    """
    tree = _object(line)
    get = Fields(tree)
    event = get.text("event")
    if event not in EVENTS:
        raise RecordError(f"event is {event!r}, expected one of {', '.join(EVENTS)}", event=event)
    origin = Origin(
        file,
        number,
        get.number("time"),
        seen.setdefault(host := get.text("host"), host),
        get.integer("pid"),
        get.optional_integer("rank"),
        get.optional_integer("world_size"),
    )
    return _READERS[event](origin, get, seen)


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(f"{len(line)} bytes, expected at most {MAX_LINE_BYTES}", is_json=False)
    try:
        tree = load_object(line, "the line")
    except DatasetError as error:
        raise RecordError(error.message.removeprefix("the line: "), is_json=False) from error
    if _depth(tree) > MAX_DEPTH:
        raise RecordError(f"nested more than {MAX_DEPTH} deep")
    return tree


def _depth(tree: Any) -> int:
    deepest, waiting = 0, [(tree, 1)]
    while waiting:
        one, depth = waiting.pop()
        deepest = max(deepest, depth)
        if depth > MAX_DEPTH:
            return depth
        inner = one.values() if isinstance(one, dict) else one
        waiting += [(item, depth + 1) for item in inner if isinstance(item, dict | list)]
    return deepest


def _payload(origin: Origin, get: Fields, seen: dict[Any, Any]) -> PayloadSample:
    return _sample(origin, None, get, seen)


def _fetch(origin: Origin, get: Fields, seen: dict[Any, Any]) -> PayloadSample:
    return _sample(origin, get.text("stage"), get, seen)


def _sample(origin: Origin, stage: str | None, get: Fields, seen: dict[Any, Any]) -> PayloadSample:
    return PayloadSample(
        origin,
        get.integer("trace_step", 1),
        stage,
        get.integer("sample_idx"),
        get.text("key"),
        get.integer("valid_length"),
        get.tensor("routed_experts", seen),
        get.optional_tensor("input_ids", seen),
    )


def _shard(origin: Origin, get: Fields, seen: dict[Any, Any]) -> Shard:
    return Shard(
        origin,
        get.integer("trace_step", 1),
        get.text("stage"),
        get.integer("microbatch_idx", 1),
        get.integer("cp_rank"),
        get.integer("cp_size", 1),
        get.tensor("tensor", seen),
        get.optional_tensor("token_identity", seen),
        get.optional_tensor("input_ids", seen),
        get.optional_integer("cp_token_identity_verified_count"),
    )


def _assignment(origin: Origin, get: Fields, seen: dict[Any, Any]) -> Assignment:
    return Assignment(
        origin,
        get.integer("trace_step", 1),
        get.text("stage"),
        get.integer("layer_number", 1),
        get.integer("payload_idx"),
        get.tensor("tensor", seen),
    )


def _action(origin: Origin, get: Fields, seen: dict[Any, Any]) -> Action:
    return Action(
        origin,
        get.integer("trace_step", 1),
        get.text("stage"),
        get.text("action"),
        get.optional_integer("layer_number"),
        get.optional_tensor("tensor", seen),
    )


def _verification(origin: Origin, get: Fields, seen: dict[Any, Any]) -> Verification:
    return Verification(
        origin,
        get.integer("trace_step", 1),
        get.text("stage"),
        get.text("action"),
        get.optional_integer("layer_number"),
        get.integer("topk", 1),
        get.optional_shape("scores_shape"),
        get.tensor("actual", seen),
        get.optional_tensor("expected", seen),
        get.boolean("matches_expected"),
        get.optional_integer("fallback_rows") or 0,
    )


_READERS: dict[str, Callable[[Origin, Fields, dict[Any, Any]], TraceRecord]] = {
    PAYLOAD: _payload,
    FETCH: _fetch,
    SHARD: _shard,
    ASSIGNMENT: _assignment,
    ACTION: _action,
    VERIFY: _verification,
}

"""Values as they are when they are handed over: numbers, and the records of samples."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from trajreplay.capture.taking.device import DeviceScalar, copied
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.records import SampleRecord

_LARGEST = 2**63 - 1
_PLAIN = frozenset({int, float, bool, str, type(None)})
# What a record may hold in a form that can change later; a writer refuses such forms of the rest.
_FIELDS = (
    *("group_index", "raw_reward", "reward", "greedy_reward", "kept_baseline", "last_value"),
    *("reward_components", "weight_versions", "truncated"),
)
_NONE: tuple[()] = ()
_texts_of = operator.attrgetter("prompt", "response", "label", "tool_output")
_RECORD_BYTES, _SPAN_BYTES = 512, 160  # of CPython on 64 bits
_fields_of = operator.attrgetter(*_FIELDS)


def kept(value: Any) -> Any:
    """One number, text or None as it is now.

    Returns:
        A plain number, text or None, or what is read later where it is on a device.

    Raises:
        CaptureError: It is something else.

    >>> import numpy as np
    >>> kept(np.array([3.0, 1.0])[:1]), kept(np.int64(2)), kept("mean")
    (3.0, 2, 'mean')
    """
    if type(value) in _PLAIN or isinstance(value, str):
        return value
    try:
        if hasattr(value, "detach") and value.device.type != "cpu":
            return copied(value.detach())
        plain = value.item() if hasattr(value, "item") else value
        return plain if type(plain) in _PLAIN else math.ldexp(plain, 0)  # `float` reads text
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CaptureError(
            f"a {type(value).__name__} is given for one number",
            hint="Give an int or a float, or an array or tensor of one element.",
        ) from error


def number(value: Any) -> Any:
    """A number as `kept`; None where it is none."""
    try:
        found = kept(value)
    except CaptureError:
        return None
    if isinstance(found, str) or (isinstance(found, int) and abs(found) > _LARGEST):
        return None
    return found


def are_plain(values: Iterable[Any]) -> bool:
    """Whether they are plain numbers, texts and None, none of which can change."""
    return _PLAIN.issuperset(map(type, values))


def fixed(values: list[Any]) -> list[Any]:
    """Numbers that no later edit reaches, and others that cannot change, for `number`."""
    if are_plain(values):
        return values
    return [number(one) for one in values]


class Taken(NamedTuple):
    """Records that no later edit of what they were made of can reach.

    Args:
        records: The records; some of their values may be on a device.
        lengths: Response tokens of each.
        size_bytes: Memory that they keep from being freed, about.
        is_plain: Whether all their values are plain ones.
    """

    records: Sequence[SampleRecord]
    lengths: list[int]
    size_bytes: int
    is_plain: bool

    def read(self) -> Sequence[SampleRecord]:
        """The records with plain values only; waits for a device."""
        return self.records if self.is_plain else _changed(self.records, read)


def taken(records: Sequence[SampleRecord]) -> Taken:
    """Take over records as they are now.

    Raises:
        CaptureError: A field has another form.
    """
    # Written out, and one pass: a training waits for it, and a loop over names takes three times
    # as long.
    plain, is_plain = _PLAIN, True
    lengths, size = [], _RECORD_BYTES * len(records)
    for one in records:
        lengths.append(one.response_length)
        if (
            (one.group_index is not None and type(one.group_index) not in plain)
            or (one.raw_reward is not None and type(one.raw_reward) not in plain)
            or (one.reward is not None and type(one.reward) not in plain)
            or (one.greedy_reward is not None and type(one.greedy_reward) not in plain)
            or (one.kept_baseline is not None and type(one.kept_baseline) not in plain)
            or (one.last_value is not None and type(one.last_value) not in plain)
            or (one.reward_components is not None and type(one.reward_components) not in plain)
            or (one.weight_versions is not None and type(one.weight_versions) not in plain)
            or (one.truncated is not None and type(one.truncated) not in plain)
        ):
            is_plain = False
        if (
            one.loss_mask is not _NONE
            or one.prompt is not None
            or one.response is not None
            or one.label is not None
            or one.tool_output is not None
            or one.weight_versions is not None
        ):
            size += _more_of(one)
    held = list(records) if is_plain else _changed(records, settled)
    return Taken(held, lengths, size, is_plain)


def _more_of(record: SampleRecord) -> int:
    """Memory that a record keeps beside its own."""
    spans = 0 if record.weight_versions is None else len(record.weight_versions)
    return sum(map(sys.getsizeof, _texts_of(record)), sys.getsizeof(record.loss_mask)) + (
        _SPAN_BYTES * spans
    )


def _changed(
    records: Sequence[SampleRecord], change: Callable[[Any], Any]
) -> Sequence[SampleRecord]:
    found = []
    for one in records:
        named = zip(_FIELDS, _fields_of(one), strict=True)
        changes = {name: change(value) for name, value in named if type(value) not in _PLAIN}
        found.append(replace(one, **changes) if changes else one)
    return found


def settled(value: Any) -> Any:
    """A value, or a mapping or sequence of them, as it is now.

    Raises:
        CaptureError: As of `kept`.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {name: settled(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(settled(one) for one in value)
    if getattr(value, "ndim", 0) > 1:  # spans as an array
        return tuple(settled(one) for one in value)
    if getattr(value, "ndim", 0) == 1 and len(value) != 1:
        return tuple(kept(one) for one in value)
    return kept(value)


def read(value: Any) -> Any:
    """What `settled` gave, in plain values; waits for a device."""
    if isinstance(value, dict):
        return {name: read(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(read, value))
    return value.item() if isinstance(value, DeviceScalar) else value

"""What records of samples must be, before they become columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from trajreplay.schema.errors import CaptureError, SchemaError, listed, named, shown
from trajreplay.schema.identity import CaptureKey, check_id
from trajreplay.schema.records import SampleLists, SampleRecord

IDS = (
    *("sample_id", "group_id", "rollout_partition_id", "consumer_batch_id", "micro_batch_id"),
    *("trajectory_id", "agent_id", "episode_id"),
)
COUNTS = {
    "response_length": 2**31 - 1,
    "total_length": 2**31 - 1,
    "group_size": 2**31 - 1,
    "context_rank": 2**31 - 1,
    "context_size": 2**31 - 1,
    "padded_length": 2**31 - 1,
    "fragment_index": 2**31 - 1,
    "turns": 2**31 - 1,
    "first_message_length": 2**31 - 1,
    "source_attempt": 2**31 - 1,
    "source_rollout_id": 2**63 - 1,
}
_NEVER_NULL = ("response_length", "total_length")
_TEXTS = ("prompt", "response", "label", "tool_output")
_TEXT_TYPES = frozenset((str, type(None)))
_texts_of = attrgetter(*_TEXTS)
_PLAIN_ID_CHARACTERS = 42  # percent-encoding takes three bytes a character, an id has 128
_SPECIAL = frozenset((".", ".."))  # names that file systems keep for themselves


def check_records(records: Any) -> Sequence[SampleRecord]:
    """Return what was handed over as a sequence of records.

    Raises:
        CaptureError: It is no sequence of `SampleRecord`, or a record has text that is none.
    """
    hint = "capture.samples([SampleRecord(sample_id=..., ...), ...])"
    if not isinstance(records, Iterable):
        kind = type(records).__name__
        raise CaptureError(
            f"samples() was given one {kind}, expected a sequence of SampleRecord", hint=hint
        )
    if isinstance(records, SampleLists) and not any(map(records.has, _TEXTS)):
        return records
    found = list(records)
    if set(map(type, found)) == {SampleRecord} and not any(map(_odd_text, found)):
        return found
    for row, one in enumerate(found):
        if not isinstance(one, SampleRecord):
            kind = type(one).__name__
            raise CaptureError(
                f"samples() was given a {kind} in row {row}, expected SampleRecord", hint=hint
            )
        for name in _TEXTS:
            text = getattr(one, name)
            if text is not None and not isinstance(text, str):
                raise CaptureError(
                    f"row {row}, sample {named(one.sample_id)}: {name} is {shown(text)}, expected "
                    "text",
                )
    return found


def _odd_text(record: SampleRecord) -> bool:
    """Whether a record has something else for text."""
    return not _TEXT_TYPES.issuperset(map(type, _texts_of(record)))


def check_values(values: dict[str, list[Any]], key: CaptureKey) -> None:
    """Refuse ids, counts, shards and sources that no row can represent; numpy's counts become int.

    Args:
        values: The fields of the records, by name, in row order.
        key: Their capture.

    Raises:
        CaptureError: All problems of a kind at once.
    """
    refuse([*_id_problems(values), *_count_problems(values)], key)
    refuse(_shard_problems(values), key)
    if key.kind == "rollout":
        refuse(_foreign(values, key), key)
    refuse(_duplicates(values), key)


def refuse(problems: list[str], key: CaptureKey) -> None:
    """Refuse what records have wrong, all of one kind at once."""
    if problems:
        raise CaptureError(
            f"capture of {key}: {len(problems)} problems of samples:\n  {listed(problems)}",
            hint="Nothing was committed. Correct the records and capture again.",
            problems=problems,
        )


def all_none(values: list[Any]) -> bool:
    """Whether a field is given of no record."""
    return values.count(None) == len(values)


def _id_problems(values: dict[str, list[Any]]) -> list[str]:
    problems = []
    for name in IDS:
        if (name != "sample_id" and all_none(values[name])) or _all_plain(values[name]):
            continue
        for row, value in enumerate(values[name]):
            if _is_plain(value) or (value is None and name != "sample_id"):
                continue
            try:
                check_id(name, value)
            except SchemaError as error:
                problems.append(f"row {row}: {error.message}")
    return problems


def _all_plain(values: list[Any]) -> bool:
    """Whether all ids pass every check at a glance."""
    if set(map(type, values)) != {str}:
        return False
    together = "".join(values)
    lengths = set(map(len, values))
    return (
        together.isascii()
        and together.isprintable()
        and min(lengths) > 0
        and max(lengths) <= _PLAIN_ID_CHARACTERS
        and _SPECIAL.isdisjoint(values)
    )


def _is_plain(value: object) -> bool:
    """Whether an id passes every check at a glance, as nearly all do."""
    return (
        isinstance(value, str)
        and 0 < len(value) <= _PLAIN_ID_CHARACTERS
        and value.isascii()
        and value.isprintable()
        and value not in _SPECIAL
    )


def _count_problems(values: dict[str, list[Any]]) -> list[str]:
    problems = []
    for name, limit in COUNTS.items():
        found = values[name]
        if name not in _NEVER_NULL and all_none(found):
            continue
        for row, value in enumerate(found):
            if type(value) is int and 0 <= value <= limit:
                continue
            if isinstance(value, np.integer) and 0 <= value <= limit:
                found[row] = int(value)
            elif value is not None or name in _NEVER_NULL:
                sample = values["sample_id"][row]
                problems.append(
                    f"row {row}: {name} of sample {named(sample)} is {shown(value)}, expected an "
                    f"integer from 0 to {limit}"
                )
    return problems


def _shard_problems(values: dict[str, list[Any]]) -> list[str]:
    problems = _padding_problems(values)
    if all_none(values["context_rank"]) and all_none(values["context_size"]):
        return problems
    pairs = zip(values["context_rank"], values["context_size"], strict=True)
    return problems + [
        f"row {row}: context_rank and context_size of sample {named(values['sample_id'][row])} are "
        f"{rank} and {size}, expected a rank below its size, or neither"
        for row, (rank, size) in enumerate(pairs)
        if (rank is None) != (size is None) or (rank is not None and rank >= size)
    ]


def _padding_problems(values: dict[str, list[Any]]) -> list[str]:
    if all_none(values["padded_length"]):
        return []
    pairs = zip(values["padded_length"], values["total_length"], strict=True)
    return [
        f"row {row}: padded_length of sample {named(values['sample_id'][row])} is {padded}, "
        f"expected at least its total_length = {total}"
        for row, (padded, total) in enumerate(pairs)
        if padded is not None and padded < total
    ]


def _foreign(values: dict[str, list[Any]], key: CaptureKey) -> list[str]:
    own = (key.attempt, key.rollout_id)
    sources = zip(values["source_attempt"], values["source_rollout_id"], strict=True)
    return [
        f"row {row}: sample {named(values['sample_id'][row])} comes from attempt {source[0]} "
        f"rollout {source[1]}, expected the rollout that is captured"
        for row, source in enumerate(sources)
        if source != own
    ]


def _duplicates(values: dict[str, list[Any]]) -> list[str]:
    names = ("sample_id", "source_attempt", "source_rollout_id")
    there = list(zip(*(values[name] for name in names), strict=True))
    if len(set(there)) == len(there):
        return []
    return [
        f"sample_id {named(sample)} of rollout {rollout} occurs {times} times, expected once"
        for (sample, _, rollout), times in Counter(there).items()
        if times > 1
    ]

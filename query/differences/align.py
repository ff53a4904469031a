"""Which sample of one run is which of the other: by id, else by content, else not at all."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

_CONTENT = ("tokens",)
_IDS = ("source_rollout_id", "sample_id", "context_rank")


@dataclass(frozen=True)
class Alignment:
    """Pairs of rows that are the same sample.

    Args:
        by: What told them: `id`, `content`, or None where nothing did.
        left, right: Row numbers, in the order of the left side.
        only_left, only_right: Rows without a partner.
        reason: Why nothing told them.
    """

    by: Literal["id", "content"] | None
    left: tuple[int, ...] = ()
    right: tuple[int, ...] = ()
    only_left: int = 0
    only_right: int = 0
    reason: str = ""


def align(left: pa.Table, right: pa.Table) -> Alignment:
    """Pair the rows of two cohorts.

    Ids are those of samples within their rollout. Where no id is on both sides, samples are told by
    their token ids; content that occurs twice on a side tells nothing, and is refused.
    """
    ids = _keys(left, _IDS), _keys(right, _IDS)
    if set(ids[0]) & set(ids[1]):
        twice = _twice(ids[0]) or _twice(ids[1])
        if twice:
            return Alignment(None, reason=f"sample {twice[-2]!r} is there twice")
        return _paired("id", *ids)
    for name in _CONTENT:
        if left[name].null_count or right[name].null_count or not left.num_rows:
            return Alignment(None, reason=f"no sample id is on both sides, and {name} are missing")
    contents = _contents(left), _contents(right)
    if not set(contents[0]) & set(contents[1]):
        return Alignment(None, reason="no sample id and no token sequence is on both sides")
    if _twice(contents[0]) or _twice(contents[1]):
        return Alignment(
            None, reason="no sample id is on both sides, and some token sequences are there twice"
        )
    return _paired("content", *contents)


def _keys(table: pa.Table, names: Sequence[str]) -> list[tuple[Hashable, ...]]:
    there = [table[name].to_pylist() for name in names if name in table.column_names]
    return list(zip(*there, strict=True))


def _contents(table: pa.Table) -> list[tuple[Hashable, ...]]:
    shards = table["context_rank"].to_pylist()
    return [
        (hashlib.blake2b(repr(tokens).encode()).digest(), shard)
        for tokens, shard in zip(table["tokens"].to_pylist(), shards, strict=True)
    ]


def _twice(keys: Sequence[tuple[Hashable, ...]]) -> tuple[Hashable, ...] | None:
    return next((key for key, count in Counter(keys).items() if count > 1), None)


def _paired(
    by: Literal["id", "content"],
    left: Sequence[tuple[Hashable, ...]],
    right: Sequence[tuple[Hashable, ...]],
) -> Alignment:
    place = {key: row for row, key in enumerate(right)}
    rows = [row for row, key in enumerate(left) if key in place]
    return Alignment(
        by,
        tuple(rows),
        tuple(place[left[row]] for row in rows),
        len(left) - len(rows),
        len(right) - len(rows),
    )

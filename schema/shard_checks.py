"""Checks of shards of samples: that each is there once, as long as its tokens, and they tile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajreplay.schema.errors import DatasetError
from trajreplay.schema.lists import Int64s, lengths_of
from trajreplay.schema.settings import LayoutSettings
from trajreplay.schema.shards import Places, Spans, WholeLists, held_tokens, response_spans

CUT_HINT = (
    "State how sequences were cut: layout.context, layout.context_multiple and "
    "layout.context_padding."
)
Flags = np.ndarray[Any, np.dtype[np.bool_]]


class Cut(NamedTuple):
    """How the samples of the rows of one capture are cut.

    Args:
        where: The capture, in words.
        layout: How its sequences were cut.
        sample_ids: (R,) Of its rows.
        total, response: (R,) int64. Their tokens, and those of the response.
        places: Which shards they are.
    """

    where: str
    layout: LayoutSettings
    sample_ids: Sequence[str]
    total: Int64s
    response: Int64s
    places: Places


def check_once(sample_ids: Sequence[str], rows: Int64s, rank: Int64s, size: Int64s) -> None:
    """Refuse samples of which not every shard is there once.

    Args:
        sample_ids: (S,) Of the samples.
        rows: (R,) int64. The sample of each shard.
        rank: (R,) int64. Which shard it is.
        size: (R,) int64. Of how many.

    Raises:
        DatasetError: There is one.
    """
    order = np.lexsort((rank, rows))
    rows, rank, size = rows[order], rank[order], size[order]
    begins = np.searchsorted(rows, np.arange(len(sample_ids)))
    count = np.bincount(rows, minlength=len(sample_ids))
    wrong = (np.arange(len(rows)) - begins[rows] != rank) | (size != count[rows])
    if wrong.any():
        sample = int(rows[np.argmax(wrong)])
        mine = rows == sample
        pairs = list(zip(rank[mine].tolist(), size[mine].tolist(), strict=True))
        raise DatasetError(
            f"of sample {sample_ids[sample]!r} the shards (rank, size) {pairs} are there, "
            "expected those of one size, each rank once",
            hint="Capture every rank of a context-parallel group, and select all of them.",
        )


def held_spans(
    name: str, column: pa.Array, cut: Cut, there: Flags, *, whole: bool = False
) -> Spans:
    """The response tokens that each list of a column holds.

    Args:
        name: The column.
        column: (R,) lists.
        cut: How its samples are cut.
        there: (R,) bool. Rows that have to have one.
        whole: Whether a list may also be that of the whole response.

    Raises:
        DatasetError: One is longer or shorter.
    """
    spans = response_spans(cut.layout, cut.total, cut.response, cut.places)
    held, lengths = held_tokens(spans), lengths_of(column)
    complete = (lengths == cut.response) & whole
    wrong = there & (lengths != held) & ~complete
    if wrong.any():
        row = int(np.argmax(wrong))
        raise DatasetError(
            f"{cut.where}: {name} of sample {cut.sample_ids[row]!r} has {lengths[row]} values, "
            f"expected {held[row]}, its tokens under the stated layout, or response_length = "
            f"{cut.response[row]} on every rank",
            hint=CUT_HINT,
        )
    if not complete.any():
        return spans
    (low, high), *others = spans
    none = np.zeros_like(cut.response)
    every = [(np.where(complete, 0, low), np.where(complete, cut.response, high))]
    return every + [
        (np.where(complete, none, one), np.where(complete, none, other)) for one, other in others
    ]


def check_tiles(
    name: str,
    found: WholeLists,
    sample_ids: Sequence[str],
    shards: Int64s | None = None,
) -> None:
    """Refuse samples whose tokens are not each in one shard.

    Args:
        name: The column.
        found: The lists that the shards were put together to.
        sample_ids: (S,) Of the samples.
        shards: (S,) int64. How many each sample has, where all may hold every token; None where
            they may not.

    Raises:
        DatasetError: There is one.
    """
    lengths = np.diff(found.offsets)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    right = np.bincount(owner, found.hits == 1, len(lengths)) == lengths
    if shards is not None:
        right |= np.bincount(owner, found.hits == shards[owner], len(lengths)) == lengths
    if not right.all():
        row = int(np.argmin(right))
        mine = found.hits[found.offsets[row] : found.offsets[row + 1]]
        token = int(np.argmax(mine != 1))
        raise DatasetError(
            f"{name} of sample {sample_ids[row]!r}: token {token} is held by {mine[token]} ranks, "
            f"expected one{'' if shards is None else ', or every token by all'}: the shards do "
            "not tile the response"
        )

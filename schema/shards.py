"""Where context parallelism puts the tokens of a response: which of them each rank holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import LayoutSettings
from trajreplay.schema.tables import RESPONSE_LISTS

Int64s = np.ndarray[Any, np.dtype[np.int64]]
Spans = list[tuple[Int64s, Int64s]]
SHARDED = ("zigzag", "contiguous")


def response_spans(
    layout: LayoutSettings, total: Int64s, response: Int64s, rank: int, size: int
) -> Spans:
    """The response tokens of each sample that a rank of a context-parallel group holds.

    A sequence of t tokens is padded to P, the next multiple of m, and cut into chunks of c tokens.
    zigzag: 2 n chunks of P / 2n, of which rank k holds k and 2n - 1 - k, in this order, m = 2n
    unless stated. contiguous: n chunks of P / n, m = n unless stated. The log-prob of response
    token j is made at position t - r - 1 + j, and lies where that position does.

    Args:
        layout: How sequences are cut.
        total: (S,) int64, t. Prompt and response tokens.
        response: (S,) int64, r. Response tokens.
        rank: k, the rank in its group.
        size: n, the ranks of the group.

    Returns:
        Pairs of (S,) int64: first token held and the one after the last, in the order in which
        they are stored; equal where there is none.

    Source:
        slime and Relax (zigzag, m = 2n), NeMo-RL and Megatron (zigzag, their own multiples),
        prime-rl (contiguous).

    >>> layout = LayoutSettings(context="zigzag")
    >>> one = np.array([11]), np.array([7])
    >>> [(int(a[0]), int(b[0])) for a, b in response_spans(layout, *one, rank=1, size=2)]
    [(0, 3), (3, 6)]
    """
    pieces = 2 * size if layout.context == "zigzag" else size
    multiple = layout.context_multiple or pieces
    chunk = -(-total // multiple) * multiple // pieces
    places = (rank, pieces - 1 - rank) if layout.context == "zigzag" else (rank,)
    first = total - response - 1  # the position that makes the first response token
    spans = []
    for place in places:
        low = np.maximum(place * chunk, first)
        high = np.maximum(np.minimum((place + 1) * chunk, total - 1), low)
        spans.append((low - first, high - first))
    return spans


def held_tokens(spans: Spans) -> Int64s:
    """(S,) int64. How many response tokens of each sample a rank holds."""
    held: Int64s = sum((stop - start for start, stop in spans), np.zeros_like(spans[0][0]))
    return held


def packed_positions(spans: Spans, offsets: Int64s) -> Int64s:
    """Where the tokens that a rank holds lie among the packed tokens of whole responses.

    Args:
        spans: The tokens of each sample that it holds.
        offsets: (S+1,) int64. Where the whole responses begin.

    Returns:
        (n,) int64, in the order in which the rank stores them.
    """
    starts = np.stack([start for start, _ in spans], 1) + offsets[:-1, None]
    lengths = np.stack([stop - start for start, stop in spans], 1).reshape(-1)
    ends = np.cumsum(lengths)
    steps = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    positions: Int64s = np.repeat(starts.reshape(-1), lengths) + steps
    return positions


def shard_lengths(
    name: str,
    layout: LayoutSettings,
    place: ParallelCoordinates,
    total_length: np.ndarray[Any, Any],
    response_length: np.ndarray[Any, Any],
) -> Int64s | None:
    """How many values of a column a rank of a context-parallel group holds of each sample.

    Args:
        name: The column.
        layout: How sequences are cut.
        place: Where the rank stands.
        total_length: (S,) int. Prompt and response tokens of the whole samples.
        response_length: (S,) int. Their response tokens.

    Returns:
        (S,) int64, or None of a column and layout of which every rank holds the whole.
    """
    if place.context_size == 1 or layout.context not in SHARDED or name not in RESPONSE_LISTS:
        return None
    total, response = total_length.astype(np.int64), response_length.astype(np.int64)
    spans = response_spans(layout, total, response, place.context_rank, place.context_size)
    return held_tokens(spans)

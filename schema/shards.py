"""Where context parallelism puts the tokens of a response: which of them each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.lists import Int64s
from trajreplay.schema.settings import LayoutSettings
from trajreplay.schema.tables import RESPONSE_LISTS

Spans = list[tuple[Int64s, Int64s]]
Piece = tuple[pa.Array, Int64s, Spans]
SHARDED = ("zigzag", "contiguous", "all-gather")
# The columns that say where the shards of rows lie, by the arguments of `row_places`.
PLACING = {
    "ranks": "context_rank",
    "sizes": "context_size",
    "batches": "micro_batch_id",
    "padded": "padded_length",
}


class Places(NamedTuple):
    """Where the shards of samples lie, (S,) int64 each.

    Args:
        rank: Rank of the shard among those of its sample.
        size: How many shards the sample has.
        start: Where its sequence begins in what is cut; 0 where each sequence is cut by itself.
        length: Tokens of what is cut, without padding to a multiple.
    """

    rank: Int64s
    size: Int64s
    start: Int64s
    length: Int64s


def row_places(
    layout: LayoutSettings,
    place: ParallelCoordinates,
    total: Int64s,
    *,
    ranks: Sequence[int | None] | None = None,
    sizes: Sequence[int | None] | None = None,
    batches: Sequence[str | None] | None = None,
    padded: Sequence[int | None] | None = None,
    where: str = "",
) -> Places:
    """Say where the shards of the rows of one capture lie.

    Args:
        layout: How sequences are cut.
        place: Where the capturing rank stands.
        total: (S,) int64. Prompt and response tokens of each row.
        ranks: `context_rank` of each row; None, of all or of one, for the rank's own.
        sizes: `context_size` of each row, likewise.
        batches: `micro_batch_id` of each row, whose sequences are one stream in `all-gather`; None
            if all rows are one.
        padded: `padded_length` of each row, whose sequence is cut by itself; None, of all or of
            one, for that of the sequence.
        where: The capture, in words.

    Raises:
        DatasetError: A row is a shard of a sequence that was padded to the length of a batch, and
            does not say to which.
    """
    count = len(total)
    rank = _filled(ranks, np.full(count, place.context_rank, np.int64))
    size = _filled(sizes, np.full(count, place.context_size, np.int64))
    if layout.context == "all-gather":
        return Places(rank, size, *_stream(total, batches))
    if layout.context_padding == "batch" and layout.context in SHARDED:
        given = [None] * count if padded is None else padded
        unsaid = (size > 1) & np.array([one is None for one in given], np.bool_)
        if unsaid.any():
            raise DatasetError(
                f"{where and f'{where}: '}row {int(np.argmax(unsaid))} has no padded_length, "
                "expected the tokens that its sequence was padded to, for layout.context_padding "
                "is 'batch'",
                hint="Record padded_length of every sample, or state layout.context_padding.",
            )
    return Places(rank, size, np.zeros_like(total), _filled(padded, total))


def _filled(values: Sequence[int | None] | None, default: Int64s) -> Int64s:
    if values is None:
        return default
    pairs = zip(values, default.tolist(), strict=True)
    return np.array([own if one is None else one for one, own in pairs], np.int64)


def _stream(total: Int64s, batches: Sequence[str | None] | None) -> tuple[Int64s, Int64s]:
    """Where each sequence begins in the stream of its micro-batch, and the length of that."""
    member = np.zeros(len(total), np.int64)
    if batches is not None:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(batches))}
        member = np.array([numbers[name] for name in batches], np.int64)
    order = np.argsort(member, kind="stable")
    sizes = np.zeros(int(member.max(initial=-1)) + 1, np.int64)
    np.add.at(sizes, member, total)
    start = np.empty_like(total)
    start[order] = np.cumsum(total[order]) - total[order]
    return start - (np.cumsum(sizes) - sizes)[member], sizes[member]


def response_spans(
    layout: LayoutSettings, total: Int64s, response: Int64s, places: Places
) -> Spans:
    """The response tokens of each sample that one of its shards holds.

    A sequence of t tokens, or of those of its batch that it was padded to, is padded to P, the next
    multiple of m, and cut into chunks of c tokens.
    zigzag: 2 n chunks of P / 2n, of which rank k holds k and 2n - 1 - k, in this order, m = 2n
    unless stated. contiguous: n chunks of P / n, m = n unless stated. all-gather: as contiguous,
    of all sequences of a micro-batch laid end to end. The log-prob of response token j is made at
    position t - r - 1 + j, and lies where that position does.

    Args:
        layout: How sequences are cut.
        total: (S,) int64, t. Prompt and response tokens.
        response: (S,) int64, r. Response tokens.
        places: k, n, and what is cut.

    Returns:
        Pairs of (S,) int64: first token held and the one after the last, in the order in which
        they are stored; equal where there is none.

    Source:
        slime and Relax (zigzag, m = 2n; all-gather), NeMo-RL and Megatron (zigzag, their own
        multiples), prime-rl (all-gather: chunks of the packed row). bshd of slime and Relax: the
        longest sequence of a data-parallel rank, rounded up, is the length of all of that rank.

    >>> layout, total = LayoutSettings(context="zigzag"), np.array([11])
    >>> places = row_places(layout, ParallelCoordinates(context_rank=1, context_size=2), total)
    >>> spans = response_spans(layout, total, np.array([7]), places)
    >>> [(int(a[0]), int(b[0])) for a, b in spans]
    [(0, 3), (3, 6)]
    """
    rank, pieces = places.rank, places.size
    held = [rank]
    if layout.context == "zigzag":
        pieces = 2 * pieces
        held = [rank, pieces - 1 - rank]
    multiple = layout.context_multiple or pieces
    chunk = -(-places.length // multiple) * multiple // pieces
    first = total - response - 1  # the position that makes the first response token
    spans = []
    for piece in held:
        low = np.maximum(piece * chunk - places.start, first)
        high = np.maximum(np.minimum((piece + 1) * chunk - places.start, total - 1), low)
        spans.append((low - first, high - first))
    return spans


def held_tokens(spans: Spans) -> Int64s:
    """(S,) int64. How many response tokens of each sample a shard holds."""
    held: Int64s = sum((stop - start for start, stop in spans), np.zeros_like(spans[0][0]))
    return held


def packed_positions(spans: Spans, starts: Int64s) -> Int64s:
    """Where the tokens that a rank holds lie among the packed tokens of whole responses.

    Args:
        spans: The tokens of each sample that it holds.
        starts: (S,) int64. Where the whole response of each begins.

    Returns:
        (n,) int64, in the order in which the rank stores them.
    """
    begins = np.stack([start for start, _ in spans], 1) + starts[:, None]
    lengths = np.stack([stop - start for start, stop in spans], 1).reshape(-1)
    ends = np.cumsum(lengths)
    steps = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    positions: Int64s = np.repeat(begins.reshape(-1), lengths) + steps
    return positions


class WholeLists(NamedTuple):
    """The lists of whole responses, and what they were made of.

    Args:
        lists: (S,) lists; null where no shard is.
        hits: (N,) int64. How many shards hold each token: 1 where they tile the responses.
        offsets: (S + 1,) int64. Where each response begins among the tokens.
    """

    lists: pa.Array
    hits: Int64s
    offsets: Int64s


def whole_lists(
    pieces: Sequence[Piece], response: Int64s, there: np.ndarray[Any, np.dtype[np.bool_]]
) -> WholeLists:
    """Put the values of shards where their tokens are.

    Args:
        pieces: A list array, the sample of each of its rows, and the tokens of it that they hold,
            as many as the list is long; null lists are of samples that are not there.
        response: (S,) int64. Response tokens of each sample.
        there: (S,) bool. Which samples have lists.
    """
    offsets = np.concatenate([[0], np.cumsum(response * there)])
    kind = pieces[0][0].type
    values = np.empty(offsets[-1], kind.value_type.to_pandas_dtype())
    hits = np.zeros(offsets[-1], np.int64)
    for column, rows, spans in pieces:
        cut: Spans = [(a * there[rows], b * there[rows]) for a, b in spans]
        places = packed_positions(cut, offsets[:-1][rows])
        values[places] = column.flatten().to_numpy(zero_copy_only=False)
        hits[places] += 1
    ends = pa.array(offsets.astype(np.int32))
    absent = None if there.all() else pa.array(~there)
    lists = pa.ListArray.from_arrays(ends, pa.array(values), type=kind, mask=absent)
    return WholeLists(lists, hits, offsets)


def shard_lengths(
    name: str,
    layout: LayoutSettings,
    places: Places,
    total_length: np.ndarray[Any, Any],
    response_length: np.ndarray[Any, Any],
) -> Int64s | None:
    """How many values of a column a rank of a context-parallel group holds of each sample.

    Args:
        name: The column.
        layout: How sequences are cut.
        places: Where its shards lie.
        total_length: (S,) int. Prompt and response tokens of the whole samples.
        response_length: (S,) int. Their response tokens.

    Returns:
        (S,) int64, or None of a column and layout of which every rank holds the whole.
    """
    sharded = layout.context in SHARDED and name in RESPONSE_LISTS
    if not sharded or bool((places.size == 1).all()):
        return None
    total, response = total_length.astype(np.int64), response_length.astype(np.int64)
    return held_tokens(response_spans(layout, total, response, places))

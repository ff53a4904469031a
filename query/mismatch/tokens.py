"""The response tokens of a piece, a block of whole samples at a time, as flat arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajreplay.query.mismatch.plan import SumPlan
from trajreplay.schema.lists import elements, lengths_of

_BLOCK_TOKENS = 1 << 16  # so few that what is made of them stays in a core's own memory
_FIRST_BUCKET = 256


class TokenPlaces(NamedTuple):
    """What tokens of one sample differ in: (N,) int64, and (N,) bool whether it is known."""

    values: Any
    known: Any

    def arrow(self, which: Any) -> pa.Array:
        """Of some tokens, null where it is not known."""
        return pa.array(self.values[which], mask=~self.known[which])


@dataclass(frozen=True)
class Tokens:
    """The response tokens of some samples, in their order.

    Args:
        row: (N,) int32. The sample in the piece.
        x: (N,) float64. The trainer's log-prob, 0 where it does not count.
        d: (N,) float64. Trainer minus sampler, 0 where it does not count.
        valid: (N,) bool. Whether it counts.
        starts: Where another sample or place begins.
        places: What else tells tokens apart, by name.
        of_other_version: (M,) int32. The samples of tokens that do not count since other weights
            sampled them, one a token.
        of_unknown_version: (U,) int32. Likewise of those that count, where it is recorded which
            weights recomputed them and not which sampled them.
    """

    row: Any
    x: Any
    d: Any
    valid: Any
    starts: Any
    places: Mapping[str, TokenPlaces]
    of_other_version: Any
    of_unknown_version: Any

    def where(self, which: Any) -> dict[str, Any]:
        """The samples and places of some tokens."""
        found = {"row": pa.array(self.row[which])}
        return found | {name: one.arrow(which) for name, one in self.places.items()}


def token_blocks(piece: pa.Table, plan: SumPlan) -> Iterator[Tokens]:
    """The tokens of a piece.

    Args:
        piece: Rows with the columns of PIECE.
        plan: What is told apart, and whether tokens of other weights count.
    """
    for batch in piece.to_batches():
        ends = np.cumsum(lengths_of(batch["mask"]))
        columns = [elements(batch[name]).to_numpy() for name in ("trainer", "sampler", "mask")]
        first = start = 0
        while first < len(batch):
            last = int(np.searchsorted(ends, start + _BLOCK_TOKENS, "right"))
            last = max(last, first + 1)
            stop = int(ends[last - 1])
            if stop > start:
                rows = batch.slice(first, last - first)
                yield _tokens(rows, plan, *(one[start:stop] for one in columns))
            first, start = last, stop


def _tokens(rows: pa.RecordBatch, plan: SumPlan, trainer: Any, sampler: Any, mask: Any) -> Tokens:
    lengths = lengths_of(rows["mask"])
    row = np.repeat(rows["row"].to_numpy(), lengths)
    valid = mask != 0
    other = unknown = row[:0]
    spanned = rows["spans"].null_count < len(rows)
    weights = _weights(rows["spans"].to_pylist(), lengths) if spanned else None
    if rows["version"].null_count < len(rows) and not plan.any_version:
        trained = np.repeat(rows["version"].fill_null(0).to_numpy(), lengths)
        told = np.repeat(rows["version"].is_valid().to_numpy(zero_copy_only=False), lengths)
        known = np.zeros(len(row), bool) if weights is None else weights.known
        unknown = row[valid & told & ~known]
        if weights is not None:
            differs = told & known & (weights.values != trained)
            other = row[valid & differs]
            valid = valid & ~differs
    places = {}
    if plan.by_token:
        nowhere = TokenPlaces(np.zeros(len(row), np.int64), np.zeros(len(row), bool))
        places["position"] = _buckets(lengths) if plan.by_position else nowhere
        places["version"] = weights if plan.by_version and weights is not None else nowhere
    x = trainer.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinities, which are stored as they are
        d = x - sampler
        if not valid.all():
            x, d = (_zeroed(one, valid) for one in (x, d))
    return Tokens(row, x, d, valid, _starts(row, places), places, other, unknown)


def _zeroed(values: Any, valid: Any) -> Any:
    """0 where a token does not count, also where there is no number."""
    found = values * valid
    if not np.isfinite(found.sum()):  # the quick way left what is not finite times 0
        found = np.where(valid, values, 0.0)
    return found


def _starts(row: Any, places: Mapping[str, TokenPlaces]) -> Any:
    changes = np.empty(len(row), bool)
    changes[0] = True
    np.not_equal(row[1:], row[:-1], out=changes[1:])
    for place in places.values():
        for values in place:
            changes[1:] |= values[1:] != values[:-1]
    return np.flatnonzero(changes)


def _weights(spans: Sequence[Any], lengths: Any) -> TokenPlaces:
    """The weights that sampled each token: those of the first span that it lies in."""
    size = int(lengths.sum())
    found = TokenPlaces(np.zeros(size, np.int64), np.zeros(size, bool))
    end = 0
    for of, length in zip(spans, lengths.tolist(), strict=True):
        start, end = end, end + length
        for span in reversed(of or ()):
            low, high = (start + min(max(span[name], 0), length) for name in ("start", "stop"))
            found.known[low:high] = span["version"] is not None
            found.values[low:high] = span["version"] or 0
    return found


def _buckets(lengths: Any) -> TokenPlaces:
    """The largest power of two that each position reaches, 0 below 256."""
    index = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    powers = 1 << np.log2(np.maximum(index, 1)).astype(np.int64)
    found = np.where(index < _FIRST_BUCKET, 0, powers)
    return TokenPlaces(found, np.ones(len(found), bool))

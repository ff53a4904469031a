"""Which positions a shard holds: found by making token identities again until the hashes agree.

A trace keeps of the identities `[sample, position, valid]` of a shard a hash and five rows. They
are a function of the lengths in the micro-batch, their padding and the context-parallel rank, so
that candidates can be tried: those that the fetched lengths allow, else all of a small batch.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from trajreplay.schema.bundles.r3.records import TensorRecord

Row: TypeAlias = tuple[int, int, int]
_PADDING: Row = (0, 0, 0)
_MOST_PERMUTED = 5
_MOST_CANDIDATES = 20_000
_MOST_GUESSED_ROWS = 64
_MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Composition:
    """One way a micro-batch may be put together.

    Args:
        samples: Numbers of its samples among the lengths that were given; empty if none were.
        lengths: Valid tokens of each.
        padded: Rows that each takes in a packed row; the row length for samples in rows.
        packed: Whether samples follow one another in one row, or have a row each.
    """

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    packed: bool

    def rows(self, cp_rank: int, cp_size: int) -> Iterator[Row]:
        """The identities that a context-parallel rank holds, in order.

        A packed sequence is cut into 2 cp_size chunks, of which rank k holds chunks k and
        2 cp_size - 1 - k.
        """
        for sample, (length, padded) in enumerate(zip(self.lengths, self.padded, strict=True)):
            for start, end in _spans(padded, cp_rank, cp_size):
                for position in range(start, end):
                    if position < length:
                        yield sample, position, 1
                    else:
                        yield _PADDING if self.packed else (sample, position, 0)


@dataclass(frozen=True)
class Solution:
    """What a search found.

    Args:
        composition: The one with the hashes of all shards, if there is one.
        mismatched: Where every possible one was tried and none has all hashes: the context-parallel
            ranks that the best one does not explain.
    """

    composition: Composition | None
    mismatched: tuple[int, ...] = ()


def solve(identities: tuple[TensorRecord, ...], lengths: tuple[int, ...] | None) -> Solution:
    """Find the composition of a micro-batch.

    Args:
        identities: Of its shards, by context-parallel rank.
        lengths: Valid tokens of the samples that may be in it, in the order in which they were
            fetched; None where they are not known.
    """
    shape = identities[0].shape
    if any(one.shape != shape for one in identities) or len(shape) != 3 or shape[2] != 3:
        return Solution(None)
    found = _search(identities, lengths)
    if lengths is None or found.composition or len(found.mismatched) < len(identities):
        return found
    # None of the fetched samples explains anything of it: it may hold others.
    guessed = _search(identities, None)
    return Solution(None, found.mismatched) if guessed.mismatched else Solution(None)


def _search(identities: tuple[TensorRecord, ...], lengths: tuple[int, ...] | None) -> Solution:
    cp_size = len(identities)
    batch, rows, _ = identities[0].shape
    best: tuple[int, ...] | None = None
    candidates, whole = _candidates(batch, rows, cp_size, lengths)
    count = 0
    for candidate in candidates:
        count += 1
        if count > _MOST_CANDIDATES:
            return Solution(None)
        missed = tuple(
            rank for rank, one in enumerate(identities) if not _fits(candidate, one, rank, cp_size)
        )
        if not missed:
            return Solution(candidate)
        if len(missed) < cp_size and (best is None or len(missed) < len(best)):
            best = missed
    return Solution(None, best or tuple(range(cp_size)) if whole and count else ())


def _fits(candidate: Composition, recorded: TensorRecord, cp_rank: int, cp_size: int) -> bool:
    """Compare the preview first, which settles nearly all, then the hash."""
    shown = itertools.islice(candidate.rows(cp_rank, cp_size), len(recorded.preview) // 3 + 1)
    if tuple(itertools.chain(*shown))[: len(recorded.preview)] != recorded.preview:
        return False
    values = array("i", itertools.chain(*candidate.rows(cp_rank, cp_size)))
    return hashlib.sha256(values.tobytes()).hexdigest() == recorded.sha256


def _candidates(
    batch: int, rows: int, cp_size: int, lengths: tuple[int, ...] | None
) -> tuple[Iterator[Composition], bool]:
    """Compositions that may be, the likely ones first, and whether those are all."""
    if batch > 1:
        if lengths is None:
            return _guessed_rows(batch, rows), rows**batch <= _MOST_CANDIDATES
        return _in_rows(batch, rows, lengths), len(lengths) <= _MOST_PERMUTED
    total = rows * cp_size
    if lengths is None:
        alone = _guessed_rows(1, rows) if cp_size == 1 else iter(())
        return itertools.chain(_guessed(total, cp_size), alone), total <= _MOST_GUESSED_ROWS
    alone = _in_rows(1, rows, lengths) if cp_size == 1 else iter(())
    return itertools.chain(_packed(total, cp_size, lengths), alone), len(lengths) <= _MOST_PERMUTED


def _choices(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Runs in the order of the fetch, then, of few samples, every other choice and order."""
    for size in range(1, most + 1):
        for start in range(count - size + 1):
            yield tuple(range(start, start + size))
    if count <= _MOST_PERMUTED:
        for size in range(1, most + 1):
            yield from itertools.permutations(range(count), size)


def _packed(total: int, cp_size: int, lengths: tuple[int, ...]) -> Iterator[Composition]:
    for chosen in _choices(len(lengths), len(lengths)):
        of = tuple(lengths[one] for one in chosen)
        if sum(of) > total:
            continue
        tried = set()
        for multiple in _multiples(cp_size):
            padded = _padded(of, multiple, total)
            if padded and padded not in tried:
                tried.add(padded)
                yield Composition(chosen, of, padded, packed=True)


def _in_rows(batch: int, rows: int, lengths: tuple[int, ...]) -> Iterator[Composition]:
    for chosen in _choices(len(lengths), min(batch, len(lengths))):
        of = tuple(lengths[one] for one in chosen)
        if len(chosen) == batch and max(of) <= rows:
            yield Composition(chosen, of, (rows,) * batch, packed=False)


def _guessed_rows(batch: int, rows: int) -> Iterator[Composition]:
    for of in itertools.product(range(1, rows + 1), repeat=batch):
        yield Composition((), of, (rows,) * batch, packed=False)


def _guessed(total: int, cp_size: int) -> Iterator[Composition]:
    """All lengths that padding allows, of a row small enough."""
    if total > _MOST_GUESSED_ROWS:
        return
    tried = set()
    for multiple in _multiples(cp_size):
        if total % multiple:
            continue
        for parts in _parts(total // multiple):
            padded = tuple(part * multiple for part in parts)
            shortest = [rows - multiple + 1 for rows in padded[:-1]] + [1]
            spans = [range(least, rows + 1) for least, rows in zip(shortest, padded, strict=True)]
            for of in itertools.product(*spans):
                if (of, padded) not in tried:
                    tried.add((of, padded))
                    yield Composition((), of, padded, packed=True)


def _parts(units: int) -> Iterator[tuple[int, ...]]:
    for first in range(units, 0, -1):
        if first == units:
            yield (units,)
        else:
            for others in _parts(units - first):
                yield (first, *others)


def _multiples(cp_size: int) -> tuple[int, ...]:
    return _MULTIPLES if cp_size == 1 else tuple(2 * cp_size * one for one in _MULTIPLES)


def _padded(lengths: tuple[int, ...], multiple: int, total: int) -> tuple[int, ...] | None:
    """Each length up to a multiple; the last sequence takes what is left of the row."""
    padded = [-(-length // multiple) * multiple for length in lengths]
    left = total - sum(padded[:-1])
    if left < padded[-1] or left % multiple:
        return None
    return (*padded[:-1], left)


def _spans(padded: int, cp_rank: int, cp_size: int) -> tuple[tuple[int, int], ...]:
    if cp_size == 1:
        return ((0, padded),)
    chunk = padded // (2 * cp_size)
    last = 2 * cp_size - 1 - cp_rank
    return (cp_rank * chunk, (cp_rank + 1) * chunk), (last * chunk, (last + 1) * chunk)

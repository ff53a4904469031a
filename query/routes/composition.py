"""Ways in which a micro-batch may be put together of samples, and the identities each gives."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

Row: TypeAlias = tuple[int, int, int]
MOST_CANDIDATES = 20_000
_MOST_PERMUTED = 5
_MOST_GUESSED_ROWS = 64
_MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Composition:
    """One way a micro-batch may be put together.

    Args:
        lengths: Valid tokens of each sample.
        padded: Rows that each takes in a packed row; the row length for samples in rows.
        packed: Whether samples follow one another in one row, or have a row each.
    """

    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    packed: bool

    def rows(self, cp_rank: int, cp_size: int) -> Iterator[Row]:
        """The identities that a context-parallel rank holds, in order."""
        values = self.values(cp_rank, cp_size)
        return zip(values[0::3], values[1::3], values[2::3], strict=True)

    def values(self, cp_rank: int, cp_size: int, most: int | None = None) -> array[int]:
        """The same row after row, of the first rows.

        A packed sequence is cut into 2 cp_size chunks, of which rank k holds chunks k and
        2 cp_size - 1 - k. Padding of a packed sequence is zero throughout.
        """
        left = sum(self.padded) if most is None else most
        values = array("i")
        for sample, (length, padded) in enumerate(zip(self.lengths, self.padded, strict=True)):
            for start, end in _spans(padded, cp_rank, cp_size):
                rows = min(end - start, left)
                valid = max(0, min(rows, length - start))
                filled = valid if self.packed else rows
                piece = array("i", bytes(3 * rows * values.itemsize))
                piece[0 : 3 * filled : 3] = array("i", [sample]) * filled
                piece[1 : 3 * filled : 3] = array("i", range(start, start + filled))
                piece[2 : 3 * valid : 3] = array("i", [1]) * valid
                values += piece
                left -= rows
            if left <= 0:
                break
        return values


def candidates(
    batch: int, rows: int, cp_size: int, lengths: tuple[int, ...] | None, valid: int
) -> tuple[Iterator[Composition], bool]:
    """Compositions that may be, the likely ones first, and whether those are all.

    Args:
        batch: Rows of samples.
        rows: Tokens that a rank holds of each.
        cp_size: Context-parallel ranks.
        lengths: Valid tokens of the samples that may be in it; None where they are not known.
        valid: Tokens that were counted: what has as many comes first.
    """
    if batch > 1:
        if lengths is None:
            return _guessed_rows(batch, rows), rows**batch <= MOST_CANDIDATES
        return _in_rows(batch, rows, lengths), len(lengths) <= _MOST_PERMUTED
    total = rows * cp_size
    if lengths is None:
        alone = _guessed_rows(1, rows) if cp_size == 1 else iter(())
        return itertools.chain(_guessed(total, cp_size), alone), total <= _MOST_GUESSED_ROWS
    alone = _in_rows(1, rows, lengths) if cp_size == 1 else iter(())
    packed = _packed(total, cp_size, lengths, valid)
    return itertools.chain(packed, alone), len(lengths) <= _MOST_PERMUTED


def _choices(lengths: tuple[int, ...], most: int, valid: int) -> Iterator[tuple[int, ...]]:
    """Lengths of runs in the order of the fetch that are no longer than a row has room for.

    Those of as many tokens as were counted come first; of few samples every other choice and order
    follows.
    """
    runs = list(_runs(lengths, most))
    yield from (run for run, total in runs if total == valid)
    yield from (run for run, total in runs if total != valid)
    if len(lengths) <= _MOST_PERMUTED:
        for size in range(2, len(lengths) + 1):
            yield from (of for of in itertools.permutations(lengths, size) if sum(of) <= most)


def _runs(lengths: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Runs and their sums, each grown until it is too long, and no more than can be tried."""
    count = 0
    for start in range(len(lengths)):
        total = 0
        for end in range(start, len(lengths)):
            total += lengths[end]
            count += 1
            if total > most or count > MOST_CANDIDATES:
                break
            yield lengths[start : end + 1], total


def _packed(
    total: int, cp_size: int, lengths: tuple[int, ...], valid: int
) -> Iterator[Composition]:
    for of in _choices(lengths, total, valid):
        tried = set()
        for multiple in _multiples(cp_size):
            padded = _padded(of, multiple, total)
            if padded and padded not in tried:
                tried.add(padded)
                yield Composition(of, padded, packed=True)


def _in_rows(batch: int, rows: int, lengths: tuple[int, ...]) -> Iterator[Composition]:
    chosen: Iterator[tuple[int, ...]] = (
        lengths[start : start + batch] for start in range(len(lengths) - batch + 1)
    )
    if len(lengths) <= _MOST_PERMUTED:
        chosen = itertools.chain(chosen, itertools.permutations(lengths, batch))
    for of in chosen:
        if max(of) <= rows:
            yield Composition(of, (rows,) * batch, packed=False)


def _guessed_rows(batch: int, rows: int) -> Iterator[Composition]:
    for of in itertools.product(range(1, rows + 1), repeat=batch):
        yield Composition(of, (rows,) * batch, packed=False)


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
                    yield Composition(of, padded, packed=True)


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

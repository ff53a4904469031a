"""Which positions a shard holds: found by making token identities again until the hashes agree.

A trace keeps of the identities `[sample, position, valid]` of a shard a hash and five rows. They
are a function of the lengths in the micro-batch, their padding and the context-parallel rank, so
that candidates can be tried: those that the fetched lengths allow, else all of a small batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from trajreplay.query.routes.composition import MOST_CANDIDATES, Composition, candidates
from trajreplay.schema.bundles.r3.records import TensorRecord

_MOST_MADE_ROWS = 4_000_000  # rows of the candidates that had to be made whole


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


def solve(
    identities: tuple[TensorRecord, ...],
    lengths: tuple[int, ...] | None,
    valid: int = 0,
    *,
    whole: bool = True,
) -> Solution:
    """Find the composition of a micro-batch.

    Args:
        identities: Of its shards, by context-parallel rank.
        lengths: Valid tokens of the samples that may be in it, in the order in which they were
            fetched; None where they are not known.
        whole: Whether these are all samples that may be in it.
        valid: Tokens that its ranks counted: what has as many is tried first; 0 if not known.
    """
    shape = identities[0].shape
    if any(one.shape != shape for one in identities) or len(shape) != 3 or shape[2] != 3:
        return Solution(None)
    found = _search(identities, lengths, valid)
    explained = len(found.mismatched) < len(identities)
    if lengths is None or found.composition or (whole and explained):
        return found
    # None of the fetched samples explains anything of it: it may hold others.
    return _search(identities, None, valid)


def _search(
    identities: tuple[TensorRecord, ...], lengths: tuple[int, ...] | None, valid: int
) -> Solution:
    cp_size = len(identities)
    batch, rows, _ = identities[0].shape
    best: tuple[int, ...] | None = None
    tried, whole = candidates(batch, rows, cp_size, lengths, valid)
    count = made = 0
    for candidate in tried:
        count += 1
        if count > MOST_CANDIDATES or made > _MOST_MADE_ROWS:
            return Solution(None)
        missed = []
        for rank, one in enumerate(identities):
            fits = _shows(candidate, one, rank, cp_size)
            if fits:
                made += rows * batch
                fits = _makes(candidate, one, rank, cp_size)
            if not fits:
                missed.append(rank)
        if not missed:
            return Solution(candidate)
        if len(missed) < cp_size and (best is None or len(missed) < len(best)):
            best = tuple(missed)
    return Solution(None, best or tuple(range(cp_size)) if whole and count else ())


def _shows(candidate: Composition, recorded: TensorRecord, cp_rank: int, cp_size: int) -> bool:
    """Whether a candidate begins as the preview does, which settles many and costs little."""
    shown = candidate.values(cp_rank, cp_size, len(recorded.preview) // 3 + 1)
    return tuple(shown[: len(recorded.preview)]) == recorded.preview


def _makes(candidate: Composition, recorded: TensorRecord, cp_rank: int, cp_size: int) -> bool:
    return hashlib.sha256(candidate.values(cp_rank, cp_size)).hexdigest() == recorded.sha256

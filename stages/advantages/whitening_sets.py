"""Which tokens of a block are whitened together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from trajreplay.schema.columns import has_column
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.shards import packed_positions, response_spans, row_places
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.constant_groups import batches_of


def tokens_of(block: Block, sets: str) -> Tensor | None:
    """(N,) int64. Which tokens are of one set; None where no such set is named.

    Args:
        block: The cohorts.
        sets: As `advantage.whiten` and `advantage.whiten_centre` name them.
    """
    packed = block.packed
    if sets == "context-rank":
        batches = batches_of(packed, block.settings).repeat_interleave(packed.lengths)
        both = _context_ranks(block) * (len(packed.lengths) + 1) + batches
        numbers: Tensor = torch.unique(both, return_inverse=True)[1]
        return numbers
    of_samples: dict[str, Callable[[], Tensor]] = {
        "cohort": lambda: batches_of(packed, block.settings),
        "rank": lambda: batches_of(packed, block.settings, by_rank=True),
        "group": lambda: packed.groups,
        "sample": lambda: torch.arange(len(packed.lengths)),
        "consumer-batch": lambda: packed.consumer_batches,
    }
    return of_samples[sets]().repeat_interleave(packed.lengths) if sets in of_samples else None


def _context_ranks(block: Block) -> Tensor:
    """(N,) int64. The context-parallel rank that held each token, numbered over all cohorts."""
    packed, layout = block.packed, block.settings.layout
    total, response = (
        packed.scalars(name).long().numpy() for name in ("total_length", "response_length")
    )
    stated = has_column(packed.table, "padded_length")
    padded = packed.table["padded_length"].to_pylist() if stated else None
    starts = packed.offsets[:-1].numpy()
    found = np.zeros(int(packed.offsets[-1]), np.int64)
    first = 0
    for cohort, (start, stop) in zip(block.cohorts, pairwise(packed.sample_bounds), strict=True):
        size = max(one.parallel.context_size for one in cohort.owners)
        own = slice(start, stop)
        for rank in range(size):
            place = ParallelCoordinates(context_rank=rank, context_size=size)
            places = row_places(layout, place, total[own], padded=padded and padded[own])
            spans = response_spans(layout, total[own], response[own], places)
            found[packed_positions(spans, starts[own])] = first + rank
        first += size
    return torch.from_numpy(found)

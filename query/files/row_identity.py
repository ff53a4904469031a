"""Which sample a row is of, and which shard of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from trajreplay.schema.entry import Entry

IDENTITY = ("source_attempt", "source_rollout_id", "sample_id")
SHARD = ("context_rank", "context_size", "micro_batch_id")
Shard = tuple[int | None, int, str | None]
WHOLE: Shard = (0, 1, None)


def names_of(found: pa.Table | Mapping[str, pa.Array]) -> Iterator[tuple[Any, ...]]:
    """The identity of each sample: source attempt, source rollout, id."""
    return zip(*(found[name].to_pylist() for name in IDENTITY), strict=True)


def shards_of(entry: Entry, found: pa.Table | Mapping[str, pa.Array]) -> Iterator[Shard]:
    """Which shard of its sample each row is: as the row says, else as its capture does.

    All-gather shards are cut from all samples of a micro-batch, and are the same in the same one.
    """
    own = entry.parallel.context_rank, entry.parallel.context_size
    for rank, size, batch in zip(*(found[name].to_pylist() for name in SHARD), strict=True):
        place = own if size is None else (rank, size)
        by_batch = place[1] > 1 and entry.settings.layout.context == "all-gather"
        yield (*place, batch if by_batch else None)

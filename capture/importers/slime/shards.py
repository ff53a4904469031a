"""What the train dumps of all ranks of a rollout hold, row by row, before it becomes captures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from trajreplay.capture.importers.torch_dumps import integers
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ParallelCoordinates

# A micro-batch of a rank, as rows; the micro-batches of a step; the steps of a rollout.
Steps = list[list[list[int]]]
_TELLING = ("tokens", "rollout_log_probs")  # what tells the samples of ranks apart


@dataclass
class Shard:
    """What one rank held of a rollout.

    Args:
        rank: The process.
        where: Its file, for messages.
        rows: Its samples in its order.
        positions: Place of each in the rollout, where it is recorded.
        indices: Number of each in the training job, where it is recorded.
        raw_rewards: Score of each, where it is recorded.
        steps: Its rows by step and micro-batch, where they are recorded.
        sizes: How many rollouts each step took over all ranks, where that is recorded.
        total: Samples that the rollout had over all ranks, where that is recorded.
        parallel: Where it stands.
    """

    rank: int
    where: str
    rows: list[Fields]
    positions: list[int] | None = None
    indices: list[int] | None = None
    raw_rewards: list[float] | None = None
    steps: Steps | None = None
    sizes: list[int] | None = None
    total: int | None = None
    parallel: ParallelCoordinates = field(default_factory=ParallelCoordinates)


def layout_of(tree: Fields, rows: int) -> tuple[Steps | None, list[int] | None]:
    """The steps and micro-batches that a dump gives, and how many rollouts each step took.

    Raises:
        DatasetError: They do not hold every row once.
    """
    sizes: list[int] | None = tree.get("global_batch_sizes", read.counts, None)
    if "micro_batch_indices" not in tree or "num_microbatches" not in tree:
        return None, sizes
    batches = tree.get("micro_batch_indices", _batches)
    counts = tree.get("num_microbatches", read.counts)
    taken = sorted(row for batch in batches for row in batch)
    if sum(counts) != len(batches) or taken != list(range(rows)):
        raise tree.error(
            "micro_batch_indices, num_microbatches",
            f"are {len(batches)} micro-batches of {len(taken)} rows in {sum(counts)} places",
            f"each of {rows} rows in one micro-batch",
        )
    ends = np.cumsum([0, *counts]).tolist()
    return [batches[start:end] for start, end in pairwise(ends)], sizes


def _batches(value: Any) -> list[list[int]]:
    """Micro-batches of row numbers; some versions hold them in lists by step."""
    if type(value) is not list:
        raise ValueError("a list of micro-batches")
    flat: list[Any] = []
    for one in value:
        nested = type(one) is list and bool(one) and type(one[0]) is list
        flat += one if nested else [one]
    return [integers(one).tolist() for one in flat]


def without_copies(shards: Sequence[Shard]) -> list[Shard]:
    """Give ranks that hold the same samples the places of a tensor-parallel group.

    Every process of a training writes a file, and none says where it stands: ranks of a pipeline's
    earlier stages hold no log-probs and are left out; of several that hold the same samples, the
    first owns them and the others are copies.

    Raises:
        DatasetError: Some ranks have copies and others have not, or nothing tells them apart.
    """
    held = [one for one in shards if any("log_probs" in row for row in one.rows)] or list(shards)
    for row in (row for one in held if len(held) > 1 for row in one.rows):
        if not any(name in row for name in _TELLING):
            raise row.error(
                " and ".join(_TELLING), "are missing", "one of them, to tell ranks from copies"
            )
    groups: dict[tuple[Any, ...], list[Shard]] = {}
    for one in held:
        groups.setdefault(_content(one), []).append(one)
    sizes = Counter(map(len, groups.values()))
    if len(sizes) > 1:
        told = "; ".join(", ".join(str(one.rank) for one in group) for group in groups.values())
        raise DatasetError(
            f"{shards[0].where}: ranks that hold the same samples are {told}, expected as many "
            "everywhere",
            hint="Files of some ranks are missing: get all of them.",
        )
    for data_rank, group in enumerate(groups.values()):
        for tensor_rank, one in enumerate(group):
            one.parallel = ParallelCoordinates(
                data_rank=data_rank,
                data_size=len(groups),
                tensor_rank=tensor_rank,
                tensor_size=len(group),
            )
    return held


def _content(shard: Shard) -> tuple[Any, ...]:
    """What tells the samples of a rank from those of another."""
    return tuple(_bytes(row.tree.get(name)) for row in shard.rows for name in _TELLING)


def _bytes(value: Any) -> bytes:
    return value.values.tobytes() if isinstance(value, TensorValue) else repr(value).encode()

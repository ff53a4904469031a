"""Which ranks work together: blocks that hold one micro-batch, pipeline stages, replicas."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.query.routes.trace import Trace


@dataclass(frozen=True)
class Block:
    """Ranks of one tensor- and context-parallel group: together they hold whole micro-batches.

    Args:
        ranks: Its ranks in order; tensor rank is the faster, context-parallel rank the slower.
        tensor: Its tensor-parallel size; 1 where every tensor rank holds the same.
        layers: MoE layers that its ranks replay.
    """

    ranks: tuple[int, ...]
    tensor: int
    layers: frozenset[int]

    def at(self, cp_rank: int) -> tuple[int, ...]:
        """The tensor ranks of one context-parallel rank, in order."""
        return self.ranks[cp_rank * self.tensor : (cp_rank + 1) * self.tensor]


@dataclass(frozen=True)
class Topology:
    """The layout of the job, as far as the records show it.

    Args:
        cp_size: Context-parallel size.
        blocks: All blocks, by rank; empty where ranks do not lie in the order of Megatron.
        replicas: Blocks of the pipeline stages of each data-parallel replica; empty where blocks
            do not divide into equal pipelines.
    """

    cp_size: int
    blocks: tuple[Block, ...]
    replicas: tuple[tuple[Block, ...], ...]

    @property
    def tells_replicas(self) -> bool:
        """Whether tensor ranks are told from replicas: where context or sequence is divided."""
        return self.cp_size > 1 or any(block.tensor > 1 for block in self.blocks)

    def block_of(self, rank: int) -> Block | None:
        """The block that a rank is in."""
        return next((one for one in self.blocks if rank in one.ranks), None)

    def replica_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that are known to see the micro-batches of a rank, itself among them."""
        for blocks in self.replicas:
            if any(rank in one.ranks for one in blocks):
                return tuple(peer for one in blocks for peer in one.ranks)
        block = self.block_of(rank)
        return block.ranks if block else (rank,)


def topology_of(trace: Trace) -> Topology:
    """Read the layout off context-parallel ranks, row counts and layers.

    Megatron numbers tensor ranks fastest, then context-parallel ranks, so that a block is a run of
    ranks; pipeline and data-parallel order may be either, and replicas come in order in both.
    """
    places = {
        rank: (shard.cp_rank, shard.cp_size)
        for shards in trace.shards.values()
        for rank, shard in shards.items()
    }
    sizes = {size for _, size in places.values()}
    cp_size = max(sizes, default=1)
    world = trace.world
    tensor = _tensor_size(trace, {rank: place for rank, (place, _) in places.items()}, cp_size)
    width = tensor * cp_size
    if tensor == 0 or len(world) % width or world != tuple(range(len(world))):
        return Topology(cp_size, (), ())
    blocks = tuple(
        Block(
            ranks := world[start : start + width],
            tensor,
            frozenset().union(*(trace.layers_of[rank] for rank in ranks)),
        )
        for start in range(0, len(world), width)
    )
    return Topology(cp_size, blocks, _replicas(blocks))


def _tensor_size(trace: Trace, places: dict[int, int], cp_size: int) -> int:
    """How many ranks in a row have the same context-parallel rank; 0 where nothing fits.

    Without context parallelism only sequence parallelism shows it: rows of a shard over rows of
    an assignment.
    """
    if cp_size == 1:
        return _sequence_split(trace)
    candidates = [
        size
        for size in range(1, len(trace.world) // cp_size + 1)
        if len(trace.world) % (size * cp_size) == 0
        and all(place == rank // size % cp_size for rank, place in places.items())
    ]
    return max(candidates, default=0)


def _sequence_split(trace: Trace) -> int:
    for cell, replays in trace.replays.items():
        for batch, shards in trace.shards.items():
            same_pass = (batch.stage, batch.step) == (cell.stage, cell.step)
            shard = shards.get(cell.rank) if same_pass and batch.microbatch == 1 else None
            if shard is None or not replays.assigned:
                continue
            rows, width = shard.routes.shape, replays.assigned[0].routes.shape
            if len(rows) == 4 and len(width) == 2 and width[0]:
                return rows[0] * rows[1] // width[0]
    return 1


def _replicas(blocks: tuple[Block, ...]) -> tuple[tuple[Block, ...], ...]:
    """The j-th block of every pipeline stage is of replica j."""
    stages: dict[frozenset[int], list[Block]] = {}
    for block in blocks:
        if block.layers:
            stages.setdefault(block.layers, []).append(block)
    counts = {len(found) for found in stages.values()}
    apart = sum(map(len, stages)) == len(frozenset().union(*stages))
    if len(counts) != 1 or not apart:
        return ()
    ordered = sorted(stages.values(), key=lambda found: min(found[0].layers))
    return tuple(zip(*ordered, strict=True))

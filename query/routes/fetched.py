"""What ranks fetched for a pass, and which blocks replay it between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from trajreplay.query.routes.topology import Block, Topology
from trajreplay.query.routes.trace import FETCH_STAGES, Batch, Pass, Trace
from trajreplay.schema.bundles.r3.records import PayloadSample, Shard


@dataclass(frozen=True)
class Share:
    """Samples that some blocks fetched for one pass.

    Args:
        stage: The stage.
        step: Its step.
        samples: In the order in which they were fetched.
        blocks: Those of the same layers that fetched them, and that replay parts of them.
        twins: Those that hold what one of `blocks` holds, and more often than it was fetched, or
            where nothing tells tensor ranks from replicas: they are not counted.
        unclear: Those that hold what another holds and may be replicas, since it may have been
            fetched for each: twins, or counted where replicas are told from tensor ranks.
        is_batch: Whether the samples are all those of the batch that they are rows of.
        is_less: Whether more tokens were replayed than they have.
    """

    stage: str
    step: int
    samples: tuple[PayloadSample, ...]
    blocks: tuple[Block, ...]
    twins: tuple[Block, ...]
    unclear: tuple[Block, ...]
    is_batch: bool
    is_less: bool

    @property
    def is_whole(self) -> bool:
        """Whether the trace holds all that was fetched for these blocks."""
        return self.is_batch and not self.is_less

    @property
    def lengths(self) -> tuple[int, ...]:
        """Valid tokens of its samples."""
        return tuple(one.valid_length for one in self.samples)


def shares_of(trace: Trace, topology: Topology) -> list[Share]:
    """Group what was fetched by pass, and by the blocks that fetched the same."""
    fetched: dict[Pass, list[PayloadSample]] = defaultdict(list)
    for one in trace.fetches:
        stage, rank = FETCH_STAGES.get(one.stage or ""), one.origin.rank
        if stage and rank is not None:
            fetched[Pass(stage, one.trace_step, rank)].append(one)
    found: list[Share] = []
    for stage, steps in trace.steps.items():
        for step in steps:
            together: dict[object, list[Block]] = defaultdict(list)
            for block in topology.blocks:
                samples = fetched.get(Pass(stage, step, block.ranks[0]), [])
                keys = frozenset((one.key, one.sample_idx) for one in samples)
                if keys:
                    together[keys, block.layers].append(block)
            for blocks in together.values():
                samples = fetched[Pass(stage, step, blocks[0].ranks[0])]
                found.append(_share(trace, topology, stage, step, samples, blocks))
    return found


def share_by_block(shares: Sequence[Share]) -> dict[tuple[str, int, tuple[int, ...]], Share]:
    """Shares by stage, step and the ranks of each of their blocks."""
    return {
        (share.stage, share.step, block.ranks): share
        for share in shares
        for block in (*share.blocks, *share.twins)
    }


def _share(
    trace: Trace,
    topology: Topology,
    stage: str,
    step: int,
    fetched: list[PayloadSample],
    blocks: list[Block],
) -> Share:
    samples = tuple(sorted(fetched, key=lambda one: one.sample_idx))
    others = {_held(trace, stage, step, block): block for block in reversed(blocks)}
    counted = tuple(block for block in blocks if block in others.values())
    twins = tuple(block for block in blocks if block not in counted)
    unclear = tuple(
        block for block in twins if _may_be_replicas(trace, stage, step, samples, (block,))
    )
    if topology.tells_replicas:
        is_each = _may_be_replicas(trace, stage, step, samples, twins)
        unclear = twins if is_each else ()
        counted, twins = (tuple(blocks), ()) if is_each else (counted, twins)
    least = sum(_least_tokens(trace, stage, step, block) for block in counted)
    known = sum(one.valid_length for one in samples)
    return Share(stage, step, samples, counted, twins, unclear, _is_batch(samples), least > known)


def _may_be_replicas(
    trace: Trace,
    stage: str,
    step: int,
    samples: tuple[PayloadSample, ...],
    twins: tuple[Block, ...],
) -> bool:
    """Whether samples were fetched often enough for blocks that hold what another one holds.

    Each sample in their recorded micro-batches is then one that was fetched again under another
    key. Where only a part of the fetches is there, so may only one of two equal samples be.
    """
    often = Counter((one.routed_experts.sha256, one.valid_length) for one in samples)
    spare = sum((count - 1) * length for (_, length), count in often.items())
    recorded = [recorded_in(trace, stage, step, block) for block in twins]
    if _is_batch(samples):
        return spare >= sum(
            shard.verified or 0
            for found in recorded
            for shards in found.values()
            for shard in shards
        )
    return spare > 0 or any(
        rows_in(trace, stage, step, block).keys() - found.keys()
        for block, found in zip(twins, recorded, strict=True)
    )


def _is_batch(samples: tuple[PayloadSample, ...]) -> bool:
    """Whether these are all samples of the batch that they are rows of."""
    sizes = {one.routed_experts.full_shape for one in samples} - {None}
    most = max((shape[0] for shape in sizes if shape), default=0)
    return {one.sample_idx for one in samples} >= set(range(most))


def _held(trace: Trace, stage: str, step: int, block: Block) -> object:
    """What the ranks of a block hold in all recorded micro-batches; itself where nothing is."""
    found = tuple(
        (number, place, content_of(trace.shards[Batch(stage, step, number)][rank]))
        for place, rank in enumerate(block.ranks)
        for number in trace.shards_of(Pass(stage, step, rank))
    )
    return found or block


def _least_tokens(trace: Trace, stage: str, step: int, block: Block) -> int:
    """Tokens that were counted in recorded micro-batches, and one of each that was not."""
    recorded = recorded_in(trace, stage, step, block)
    least = sum(shard.verified or 0 for shards in recorded.values() for shard in shards)
    return least + len(set(rows_in(trace, stage, step, block)) - recorded.keys())


def recorded_in(trace: Trace, stage: str, step: int, block: Block) -> dict[int, tuple[Shard, ...]]:
    """Shards of a block by micro-batch, one of each context-parallel rank that recorded it."""
    found: dict[int, tuple[Shard, ...]] = {}
    for number in trace.shards_of(Pass(stage, step, block.ranks[0])):
        shards = trace.shards[Batch(stage, step, number)]
        firsts = block.ranks[:: block.tensor]
        found[number] = tuple(shards[rank] for rank in firsts if rank in shards)
    return found


def rows_in(trace: Trace, stage: str, step: int, block: Block) -> dict[int, int]:
    """Rows that a block's ranks replay of each micro-batch: most of any rank."""
    rows: dict[int, int] = {}
    for rank in block.ranks:
        for number, count in trace.rows_of(Pass(stage, step, rank)).items():
            rows[number] = max(rows.get(number, 0), count)
    return rows


def content_of(shard: Shard) -> tuple[str | None, ...]:
    """Hashes of routes, identities and tokens."""
    tensors = (shard.routes, shard.identity, shard.input_ids)
    return tuple(None if one is None else one.sha256 for one in tensors)

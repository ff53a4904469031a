"""Whether a stage replayed as many tokens as its ranks fetched for it."""

from __future__ import annotations

from collections import defaultdict

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.shards import Held
from trajreplay.query.routes.topology import Block, Topology
from trajreplay.query.routes.trace import FETCH_STAGES, Batch, Pass, Trace

# With these broken, micro-batches or lengths are known to be missing or wrong.
_BEFORE = (
    "rank.coverage",
    "fetch.coverage",
    "fetch.hash",
    "tensor.shape",
    "assign.coverage",
    "layer.coverage",
    "assign.count",
    "cp.coverage",
    "cp.identity",
    "cp.reassembly",
)


def check_amounts(
    trace: Trace, topology: Topology, held: list[Held], policy: RoutePolicy, say: RouteFindings
) -> None:
    """Find whole micro-batches that no rank replayed, so that no other rule misses them.

    A micro-batch whose shards were recorded has as many tokens as they count; of one beyond those,
    its rows are an upper bound, since padding only adds to them.

    Args:
        trace: The trace.
        topology: Which ranks work together.
        held: What shards hold.
        policy: The stages that replay.
        say: The findings.
    """
    if say.has_failed(*_BEFORE):
        return
    if not topology.blocks:
        reason = "whether ranks replayed all tokens that they fetched is not known: no order of "
        say.unverified("assign.coverage", reason + "them is")
        return
    counted = {
        (one.batch, one.block.ranks): sum(shard.verified or 0 for shard in one.shards)
        for one in held
    }
    for stage in policy.stages:
        fetched = _fetched(stage, trace)
        together: dict[object, list[Block]] = defaultdict(list)
        for block in topology.blocks:
            if block.layers:
                together[fetched.get(block.ranks[0], frozenset()), block.layers].append(block)
        for blocks in together.values():
            rank = blocks[0].ranks[0]
            expected = sum(length for _, _, length in fetched.get(rank, frozenset()))
            found = sum(_tokens(stage, block, trace, topology, counted) for block in blocks)
            if found < expected:
                ranks = ", ".join(str(rank) for block in blocks for rank in block.ranks)
                say.fail(
                    "assign.coverage",
                    f"ranks {ranks} fetched {expected} tokens for {stage} and replayed {found} at "
                    "most: micro-batches of it were not replayed",
                    stage=stage,
                    rank=rank,
                )


def _fetched(stage: str, trace: Trace) -> dict[int, frozenset[tuple[int, str, int]]]:
    """Step, key and valid tokens of each sample that a rank fetched for a traced step."""
    steps = set(trace.steps.get(stage, ()))
    found: dict[int, set[tuple[int, str, int]]] = defaultdict(set)
    for one in trace.fetches:
        rank = one.origin.rank
        if FETCH_STAGES.get(one.stage or "") != stage or rank is None:
            continue
        if one.trace_step in steps:
            found[rank].add((one.trace_step, one.key, one.valid_length))
    return {rank: frozenset(samples) for rank, samples in found.items()}


def _tokens(
    stage: str,
    block: Block,
    trace: Trace,
    topology: Topology,
    counted: dict[tuple[Batch, tuple[int, ...]], int],
) -> int:
    """How many tokens a block replayed at most, over all steps."""
    split = _split(stage, block, trace)
    total = 0
    for step in trace.steps.get(stage, ()):
        rows: dict[int, int] = {}
        for rank in block.ranks:
            for number, count in trace.rows_of(Pass(stage, step, rank)).items():
                rows[number] = max(rows.get(number, 0), count)
        for number, count in rows.items():
            most = count * split * topology.cp_size
            total += min(most, counted.get((Batch(stage, step, number), block.ranks), most))
    return total


def _split(stage: str, block: Block, trace: Trace) -> int:
    """Among how many tensor ranks the rows of a shard are divided: 1 where each has them all."""
    split = 1
    for batch, shards in trace.shards.items():
        for rank in block.ranks if batch.stage == stage else ():
            count = trace.rows_of(Pass(stage, batch.step, rank)).get(batch.microbatch, 0)
            if rank in shards and count:
                batches, rows = (*shards[rank].routes.shape[:2], 1, 1)[:2]
                split = max(split, -(-batches * rows // count))
    return split

"""Whether a stage replayed every sample that its ranks fetched for it, and each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trajreplay.query.routes.fetched import Share, recorded_in, rows_in
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.payloads import Matched
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.shards import Held
from trajreplay.query.routes.topology import Block, Topology
from trajreplay.query.routes.trace import Batch, Pass, Trace

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
    "installed.payload",
)


def check_amounts(
    trace: Trace,
    topology: Topology,
    shares: Sequence[Share],
    held: Sequence[Held],
    matched: Mapping[int, Matched],
    policy: RoutePolicy,
    say: RouteFindings,
) -> None:
    """Find samples that were fetched and that no micro-batch replays, or several do.

    Of a micro-batch whose shards were recorded, the lengths of its samples may be known, and are
    among those fetched; else it has as many tokens as were counted. Of one beyond those, its rows
    are an upper bound, since padding only adds to them.

    Args:
        trace: The trace.
        topology: Which ranks work together.
        shares: What was fetched.
        held: What shards hold.
        matched: Of shares by number, what samples were put together of.
        policy: The stages that replay.
        say: The findings.
    """
    if say.has_failed(*_BEFORE):
        return
    if not topology.blocks:
        reason = "whether ranks replayed all tokens that they fetched is not known: no order of "
        say.unverified("assign.coverage", reason + "them is")
        return
    known = {(one.batch, one.block.ranks): one for one in held}
    for number, share in enumerate(shares):
        if share.stage in policy.stages and share.blocks[0].layers:
            counted = _replayed(trace, topology, share, share.blocks, known)
            all_of_them = tuple(dict.fromkeys((*share.blocks, *share.unclear)))
            most = _most(share, *_replayed(trace, topology, share, all_of_them, known))
            _check_share(share, *counted, most, matched.get(number), say)


def _replayed(
    trace: Trace,
    topology: Topology,
    share: Share,
    blocks: Sequence[Block],
    known: Mapping[tuple[Batch, tuple[int, ...]], Held],
) -> tuple[Counter[int], int]:
    """Lengths of the samples that were replayed, and tokens of micro-batches without, at most."""
    lengths: Counter[int] = Counter()
    others = 0
    for block in blocks:
        rows = rows_in(trace, share.stage, share.step, block)
        recorded = recorded_in(trace, share.stage, share.step, block)
        split = _split(share.stage, block, trace) * topology.cp_size
        for number in sorted(rows.keys() | recorded.keys()):
            one = known.get((Batch(share.stage, share.step, number), block.ranks))
            if one and one.composition:
                lengths.update(one.composition.lengths)
            elif one:
                others += sum(shard.verified or 0 for shard in one.shards)
            else:
                others += rows.get(number, 0) * split
    return lengths, others


def _most(share: Share, lengths: Counter[int], others: int) -> int:
    """Tokens of what was fetched that were replayed, at most."""
    return sum((lengths & Counter(share.lengths)).elements()) + others


def _check_share(
    share: Share,
    lengths: Counter[int],
    others: int,
    most_of_all: int,
    matched: Matched | None,
    say: RouteFindings,
) -> None:
    again = lengths - Counter(share.lengths) if share.is_whole else Counter[int]()
    most = _most(share, lengths, others)
    ranks = ", ".join(str(rank) for block in share.blocks for rank in block.ranks)
    reason = ""
    if again:
        told = ", ".join(str(length) for length in sorted(again.elements()))
        reason = f"replayed samples of {told} tokens more often than they fetched some"
    elif most < sum(share.lengths):
        reason = f"fetched {sum(share.lengths)} tokens and replayed {most} of them at most"
    elif matched and matched.left and not others and matched.count == lengths.total():
        told = ", ".join(str(one.sample_idx) for one in matched.left)
        reason = f"fetched samples {told} and replayed others instead"
    if reason and share.unclear and not again and most_of_all >= sum(share.lengths):
        twins = ", ".join(str(rank) for block in share.unclear for rank in block.ranks)
        say.unverified(
            "assign.coverage",
            f"ranks {ranks} {reason} in {share.stage}, unless ranks {twins}, which hold the same, "
            "are replicas with equal samples: nothing tells those from tensor ranks",
            **_place(share, share.blocks[0]),
        )
    elif reason:
        say.fail(
            "assign.coverage",
            f"ranks {ranks} {reason} in {share.stage}: not every sample was replayed",
            **_place(share, share.blocks[0]),
        )
    elif others and any(block in share.blocks for block in share.unclear):
        twins = ", ".join(str(rank) for block in share.unclear for rank in block.ranks)
        say.unverified(
            "assign.coverage",
            f"ranks {twins} hold what others of {ranks} hold in all recorded micro-batches of "
            f"{share.stage}: whether they replay other samples after those is not known",
            **_place(share, share.unclear[0]),
        )
    elif share.is_batch and share.is_less:
        say.unverified(
            "assign.coverage",
            f"ranks {ranks} replayed more tokens in {share.stage} than the traces hold of what "
            "they fetched: whether a sample was replayed twice is not known",
            **_place(share, share.blocks[0]),
        )


def _place(share: Share, block: Block) -> dict[str, Any]:
    """Where a finding on some ranks of a share lies."""
    return {"stage": share.stage, "trace_step": share.step, "rank": block.ranks[0]}


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

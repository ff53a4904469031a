"""Context-parallel shards: what each holds, that together they hold all, and routes by stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trajreplay.query.routes.composition import Composition
from trajreplay.query.routes.counts import check_counts, check_valid, valid_rows, where_of
from trajreplay.query.routes.fetched import Share, content_of, share_by_block
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.identity import Solution, solve
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.topology import Block, Topology
from trajreplay.query.routes.trace import Batch, Trace
from trajreplay.schema.bundles.r3.records import Shard, TensorRecord


@dataclass(frozen=True)
class Held:
    """A micro-batch of one block, with what was found out about it.

    Args:
        batch: The micro-batch.
        block: The ranks that hold it.
        shards: One for each context-parallel rank, in order.
        share: What its ranks fetched for the pass; None if nothing is known of it.
        composition: Which positions are where; None where that is not known.
    """

    batch: Batch
    block: Block
    shards: tuple[Shard, ...]
    share: Share | None
    composition: Composition | None


def check_shards(
    trace: Trace,
    topology: Topology,
    shares: Sequence[Share],
    policy: RoutePolicy,
    say: RouteFindings,
) -> list[Held]:
    """Check identities, counts and reassembly of every micro-batch whose shards are there."""
    _check_shapes(trace, say)
    found: list[Held] = []
    solved: dict[object, Solution] = {}
    of_blocks = share_by_block(shares)
    undecided = 0
    # Lengths that were not all fetched, or not as they were put, leave no search complete.
    trusted = not say.has_failed("fetch.coverage", "fetch.hash", "tensor.shape")
    for batch, shards in sorted(trace.shards.items()):
        if batch.stage not in policy.stages:
            continue
        for block in topology.blocks:
            if any(rank not in shards for rank in block.ranks):
                continue  # cp.coverage says so
            _check_peers(batch, block, shards, say)
            first = tuple(shards[block.at(place)[0]] for place in range(topology.cp_size))
            share = of_blocks.get((batch.stage, batch.step, block.ranks))
            verified = _check_identities(batch, tuple(shards[rank] for rank in block.ranks), say)
            held = Held(batch, block, first, share, None)
            if verified:
                held = _check_block(held, solved, trusted, say)
            undecided += held.composition is None
            found.append(held)
    if undecided and not say.has_failed("cp.reassembly"):
        say.unverified(
            "cp.reassembly",
            f"{undecided} of {len(found)} micro-batches: the lengths in them are not known, so "
            "that their hashes say which shards are equal, not which positions they hold",
        )
    check_counts(trace, policy, say)
    if not topology.blocks:
        _check_unplaced(trace, policy, say)
    if trace.shards and not found:
        reason = "of no micro-batch is it known which ranks hold it"
        if not topology.blocks:
            reason += ": they are not numbered as Megatron numbers them"
        for rule in ("cp.identity", "cp.reassembly", "installed.payload"):
            say.unverified(rule, reason)
    return found


def _check_unplaced(trace: Trace, policy: RoutePolicy, say: RouteFindings) -> None:
    """Where it is not known which ranks belong together, count identities over all of them."""
    for batch, shards in sorted(trace.shards.items()):
        if batch.stage in policy.stages and shards:
            _check_identities(batch, tuple(one for _, one in sorted(shards.items())), say)


def _check_shapes(trace: Trace, say: RouteFindings) -> None:
    """Routes, identities and tokens of a shard have the same rows; assignments have as many."""
    wide = {shard.routes.shape[2:] for one in trace.shards.values() for shard in one.values()}
    if len(wide) > 1:
        say.fail("tensor.shape", f"shards differ in layers or choices: {sorted(wide)}")
    for batch, shards in sorted(trace.shards.items()):
        for rank, shard in sorted(shards.items()):
            rows = shard.routes.shape[:2]
            fits = len(shard.routes.shape) == 4
            fits &= shard.identity is None or shard.identity.shape == (*rows, 3)
            fits &= shard.input_ids is None or shard.input_ids.shape == rows
            if not fits:
                say.fail(
                    "tensor.shape",
                    f"{shard.origin.file}, line {shard.origin.line}: routes "
                    f"{list(shard.routes.shape)}, identities and tokens of other rows",
                    stage=batch.stage,
                    rank=rank,
                    microbatch=batch.microbatch,
                )


def _check_peers(batch: Batch, block: Block, shards: dict[int, Shard], say: RouteFindings) -> None:
    """Tensor ranks of one context-parallel rank hold the same shard."""
    for start in range(0, len(block.ranks), block.tensor):
        first, *others = block.ranks[start : start + block.tensor]
        for rank in others:
            if content_of(shards[rank]) != content_of(shards[first]):
                say.fail(
                    "cp.reassembly",
                    f"ranks {first} and {rank} should hold the same shard of micro-batch "
                    f"{batch.microbatch} in {batch.stage}, and do not",
                    **where_of(batch, shards[rank]),
                )


def _check_block(
    held: Held, solved: dict[object, Solution], trusted: bool, say: RouteFindings
) -> Held:
    batch, shards, share = held.batch, held.shards, held.share
    identities = tuple(shard.identity for shard in shards if shard.identity)
    if _has_twins(batch, shards, say):
        return held
    lengths, whole = (share.lengths, share.is_whole) if share else (None, False)
    counted = sum(shard.verified or 0 for shard in shards)
    key = (lengths, whole, counted, *(one.sha256 for one in identities))
    if key not in solved:
        solved[key] = solve(identities, lengths, counted, whole=whole)
    solution = solved[key]
    for place in solution.mismatched if trusted else ():
        shard = shards[place]
        say.fail(
            "cp.reassembly",
            f"the shard of context-parallel rank {place} (rank {shard.origin.rank}) of micro-batch "
            f"{batch.microbatch} in {batch.stage} is not what is left of it by the others: no "
            "lengths and padding give its identities",
            **where_of(batch, shard),
        )
    if solution.composition:
        check_valid(batch, shards, solution.composition, say)
    return replace(held, composition=solution.composition)


def _check_identities(batch: Batch, shards: tuple[Shard, ...], say: RouteFindings) -> bool:
    """Whether identities were verified on every rank, and on some rank more than none."""
    told = f"micro-batch {batch.microbatch} of {batch.stage}"
    if any(shard.identity is None or shard.verified is None for shard in shards):
        say.fail(
            "cp.identity",
            f"{told}: token identities were not verified on every rank; set "
            "NRL_R3_TRACE_VERIFY_FORWARD=1",
            **where_of(batch, shards[0]),
        )
        return False
    if not any(shard.verified for shard in shards):
        say.fail(
            "cp.identity",
            f"{told}: no token identity was verified on any of its {len(shards)} ranks",
            **where_of(batch, shards[0]),
        )
        return False
    return True


def _has_twins(batch: Batch, shards: tuple[Shard, ...], say: RouteFindings) -> bool:
    """Look for positions that two ranks hold: equal identities, or equal rows in previews."""
    found = False
    rows = [valid_rows(shard.identity) for shard in shards]
    for place, shard in enumerate(shards):
        for other in range(place):
            before = shards[other]
            equal = _hash(shard.identity) == _hash(before.identity)
            common = rows[place] & rows[other]
            if (equal and (shard.verified or before.verified)) or common:
                found = True
                say.fail(
                    "cp.reassembly",
                    f"context-parallel ranks {other} and {place} hold the same positions of "
                    f"micro-batch {batch.microbatch} in {batch.stage}: others are nowhere",
                    **where_of(batch, shard),
                )
    return found


def _hash(tensor: TensorRecord | None) -> str | None:
    return None if tensor is None else tensor.sha256

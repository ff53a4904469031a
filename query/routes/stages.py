"""Whether train replays what prev-logprob replayed for the same tokens."""

from __future__ import annotations

from collections import defaultdict

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.payloads import Put
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.trace import Batch, Trace
from trajreplay.schema.bundles.r3.records import Shard

_BEFORE, _AFTER = "prev-logprob", "train"


def check_stage_routes(
    trace: Trace, policy: RoutePolicy, put: list[Put], say: RouteFindings
) -> None:
    """Compare shards of the same tokens, and samples where micro-batches differ.

    Args:
        trace: The trace.
        policy: The stages that replay.
        put: Samples that could be put together again.
        say: The findings.
    """
    if len(policy.stages) < 2:
        return
    unmatched = _compare_shards(trace, say)
    routes: dict[object, set[object]] = defaultdict(set)
    for one in put:
        if one.batch.stage == _BEFORE:
            routes[one.tokens].add(one.routes)
    shown: set[tuple[Batch, int]] = set()
    hidden: set[tuple[Batch, int]] = set()
    for one in put:
        places = {(one.batch, rank) for rank in one.ranks} & unmatched
        if one.tokens not in routes:
            hidden |= places
            continue
        shown |= places
        if places and one.routes not in routes[one.tokens]:
            say.fail(
                "stage.routes",
                f"a sample of micro-batch {one.batch.microbatch} of train is replayed with other "
                "routes than prev-logprob replayed for its tokens",
                stage=_AFTER,
                trace_step=one.batch.step,
                microbatch=one.batch.microbatch,
            )
    if left := unmatched - (shown - hidden):
        say.unverified(
            "stage.routes",
            f"{len(left)} shards of train hold tokens that none of prev-logprob held alike",
        )


def _compare_shards(trace: Trace, say: RouteFindings) -> set[tuple[Batch, int]]:
    """Compare shards of train with those of the same tokens; return those without any."""
    before: dict[object, set[str]] = defaultdict(set)
    after: list[tuple[Batch, int, Shard]] = []
    for batch, shards in sorted(trace.shards.items()):
        for rank, shard in sorted(shards.items()):
            if batch.stage == _BEFORE:
                before[rank, _tokens(shard)].add(shard.routes.sha256)
                before[_tokens(shard)].add(shard.routes.sha256)
            elif batch.stage == _AFTER:
                after.append((batch, rank, shard))
    unmatched: set[tuple[Batch, int]] = set()
    for batch, rank, shard in after:
        tokens = _tokens(shard) if shard.input_ids and shard.identity else None
        known = before.get((rank, tokens), before.get(tokens))
        if known is None:
            unmatched.add((batch, rank))
        elif shard.routes.sha256 not in known:
            say.fail(
                "stage.routes",
                f"rank {rank} replays other routes for micro-batch {batch.microbatch} of train "
                "than prev-logprob did for the same tokens",
                stage=_AFTER,
                trace_step=batch.step,
                microbatch=batch.microbatch,
                rank=rank,
                cp_rank=shard.cp_rank,
            )
    return unmatched


def _tokens(shard: Shard) -> object:
    return (
        shard.cp_rank,
        shard.input_ids and shard.input_ids.sha256,
        shard.identity and shard.identity.sha256,
    )

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
    put = [one for one in put if one.tokens]
    unmatched = _compare_shards(trace, say)
    routes: dict[object, set[object]] = defaultdict(set)
    for one in put:
        if one.held.batch.stage == _BEFORE:
            routes[one.tokens].add(one.routes)
    for one in put:
        places = {(one.held.batch, rank) for rank in one.ranks} & unmatched
        alike = (
            routes.get(one.tokens, {one.routes}) if one.held.batch.stage == _AFTER else {one.routes}
        )
        if places and one.routes not in alike:
            say.fail(
                "stage.routes",
                f"a sample of micro-batch {one.held.batch.microbatch} of train is replayed with "
                "other routes than prev-logprob replayed for its tokens",
                stage=_AFTER,
                trace_step=one.held.batch.step,
                microbatch=one.held.batch.microbatch,
            )
    for stage, other in ((_AFTER, _BEFORE), (_BEFORE, _AFTER)):
        if left := _left(put, unmatched, stage):
            say.unverified(
                "stage.routes",
                f"{len(left)} shards of {stage} hold tokens that none of {other} held alike",
            )


def _left(put: list[Put], unmatched: set[tuple[Batch, int]], stage: str) -> set[tuple[Batch, int]]:
    """Unmatched shards of a stage that hold a sample not known to be in the other stage."""
    others = {one.tokens for one in put if one.held.batch.stage != stage}
    shown: set[tuple[Batch, int]] = set()
    hidden: set[tuple[Batch, int]] = set()
    for one in put:
        places = {(one.held.batch, rank) for rank in one.ranks}
        (shown if one.tokens in others else hidden).update(places)
    return {one for one in unmatched if one[0].stage == stage} - (shown - hidden)


def _compare_shards(trace: Trace, say: RouteFindings) -> set[tuple[Batch, int]]:
    """Compare shards of train with those of the same tokens; return those without, of either."""
    before: dict[object, set[str]] = defaultdict(set)
    held: dict[str, list[tuple[Batch, int, Shard]]] = {_BEFORE: [], _AFTER: []}
    for batch, shards in sorted(trace.shards.items()):
        for rank, shard in sorted(shards.items()):
            if batch.stage == _BEFORE:
                before[rank, _tokens(shard)].add(shard.routes.sha256)
                before[_tokens(shard)].add(shard.routes.sha256)
            if batch.stage in held:
                held[batch.stage].append((batch, rank, shard))
    replayed = {_tokens(shard) for _, _, shard in held[_AFTER]}
    unmatched = {
        (batch, rank)
        for batch, rank, shard in held[_BEFORE]
        if not (shard.input_ids and shard.identity) or _tokens(shard) not in replayed
    }
    for batch, rank, shard in held[_AFTER]:
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

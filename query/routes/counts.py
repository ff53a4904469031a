"""How many rows of a shard were verified, held against how many it has."""

from __future__ import annotations

from collections import defaultdict

from trajreplay.query.routes.composition import Composition
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.trace import Batch, Trace
from trajreplay.schema.bundles.r3.records import Shard, TensorRecord


def check_valid(
    batch: Batch, shards: tuple[Shard, ...], composition: Composition, say: RouteFindings
) -> None:
    """Hold the counts of a micro-batch whose composition is known against its valid rows."""
    for place, shard in enumerate(shards):
        valid = sum(row[2] for row in composition.rows(place, len(shards)))
        if shard.verified != valid:
            say.fail(
                "cp.reassembly",
                f"rank {shard.origin.rank} verified {shard.verified} rows of micro-batch "
                f"{batch.microbatch} in {batch.stage}, its shard has {valid}",
                **where_of(batch, shard),
            )


def check_counts(trace: Trace, policy: RoutePolicy, say: RouteFindings) -> None:
    """Shards of the same identities were counted alike, in whatever stage and on whatever rank."""
    found: dict[str, list[tuple[int, Batch, Shard]]] = defaultdict(list)
    for batch, shards in sorted(trace.shards.items()):
        if batch.stage not in policy.stages:
            continue
        for shard in shards.values():
            if shard.identity is None or shard.verified is None:
                continue
            rows = shard.identity.size // 3
            known = len(valid_rows(shard.identity)) if shard.identity.is_whole else None
            wrong = shard.verified > rows or (known is not None and shard.verified != known)
            if wrong and not _is_said(batch, shard, say):
                say.fail(
                    "cp.reassembly",
                    f"rank {shard.origin.rank} verified {shard.verified} rows, its shard of "
                    f"micro-batch {batch.microbatch} in {batch.stage} has {known or rows}",
                    **where_of(batch, shard),
                )
            found[shard.identity.sha256].append((shard.verified, batch, shard))
    for alike in found.values():
        most, where, _ = max(alike, key=lambda one: one[0])
        for count, batch, shard in alike:
            if count < most and not _is_said(batch, shard, say):
                say.fail(
                    "cp.reassembly",
                    f"rank {shard.origin.rank} verified {count} rows of micro-batch "
                    f"{batch.microbatch} in {batch.stage}, and {most} with the same identities in "
                    f"{where.stage}",
                    **where_of(batch, shard),
                )


def valid_rows(identity: TensorRecord | None) -> set[tuple[int, int]]:
    """Positions of valid rows that a preview shows."""
    values = () if identity is None else identity.preview
    rows = zip(values[0::3], values[1::3], values[2::3], strict=False)
    return {(sample, position) for sample, position, valid in rows if valid == 1}


def _is_said(batch: Batch, shard: Shard, say: RouteFindings) -> bool:
    where = where_of(batch, shard)
    return any(one.rule == "cp.reassembly" and one.where == where for one in say.found)


def where_of(batch: Batch, shard: Shard) -> dict[str, object]:
    """Where a finding about a shard is."""
    return {
        "stage": batch.stage,
        "trace_step": batch.step,
        "microbatch": batch.microbatch,
        "rank": shard.origin.rank,
        "cp_rank": shard.cp_rank,
    }

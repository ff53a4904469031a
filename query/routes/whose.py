"""Whether traces are of the attempt that is judged, by what its captures say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.shards import Held
from trajreplay.query.routes.trace import Trace
from trajreplay.schema.process import process_digest

RULE = "trace.attempt"
TRAIN = "train"  # the stage that is entered once an optimizer step


@dataclass(frozen=True)
class AttemptFacts:
    """What is known of an attempt beside its traces; of what is not known nothing is demanded.

    Args:
        processes: By rank in the job, the digests of the processes that captured as that rank.
        worlds: Ranks of the job, as those processes say.
        product: What the ranks of the job are a multiple of: the sizes of all parallel dimensions.
        ranks: Ranks that captured for the trainer.
        context: Context-parallel sizes larger than 1 that captures state.
        steps: Optimizer steps that it told of; None where it did not tell of each.
        lengths: How many consumed samples have so many tokens; None unless each was captured.
    """

    processes: Mapping[int, Collection[str]] = field(default_factory=dict)
    worlds: Collection[int] = ()
    product: int = 1
    ranks: Collection[int] = ()
    context: Collection[int] = ()
    steps: int | None = None
    lengths: Mapping[int, int] | None = None


def check_whose(
    trace: Trace, held: Sequence[Held], facts: AttemptFacts, say: RouteFindings
) -> None:
    """Fail what contradicts the attempt; unless processes agree it is unverified.

    Jobs on one data set may train on samples of the same lengths at the same time.
    """
    _check_ranks(trace, facts, say)
    traced = max((one.step for one in trace.passes if one.stage == TRAIN), default=0)
    if facts.steps is not None and traced > facts.steps:
        say.fail(
            RULE,
            f"train is traced up to its pass {traced}, and the attempt told of {facts.steps} steps",
            stage=TRAIN,
            trace_step=traced,
        )
    is_known = _check_processes(trace, facts, say)
    by_lengths = _check_lengths(trace, held, facts, say)
    if not is_known and not say.has_failed(RULE):
        alone, lacks = "time alone says", ", nor samples whose lengths they show"
        if by_lengths:
            alone, lacks = "times and lengths of samples alone say", ""
        say.unverified(
            RULE,
            f"{alone} whose traces they are: its captures name no process of theirs{lacks}",
        )


def _check_processes(trace: Trace, facts: AttemptFacts, say: RouteFindings) -> bool:
    """Hold the processes of the traces against those that captured; true if any was compared."""
    origins = [one.origin for one in trace.records]
    told = {(one.rank, one.host, one.pid) for one in origins if one.rank is not None}
    compared = sorted(one for one in told if one[0] in facts.processes)
    for rank, host, pid in compared:
        if process_digest(host, pid) not in facts.processes[rank]:
            say.fail(
                RULE,
                f"rank {rank} is process {host}:{pid}, and another one captured as that rank of "
                "the attempt: they are of another job",
                rank=rank,
            )
            break
    return bool(compared)


def _check_ranks(trace: Trace, facts: AttemptFacts, say: RouteFindings) -> None:
    world = max((one.origin.world_size or 0 for one in trace.records), default=0)
    if not world:
        return
    if facts.worlds and world not in facts.worlds:
        sizes = " or ".join(str(one) for one in sorted(facts.worlds))
        say.fail(RULE, f"they are of a job of {world} ranks, and the attempt is one of {sizes}")
    elif world % facts.product:
        say.fail(
            RULE,
            f"they are of a job of {world} ranks, and the parallel dimensions of the attempt are "
            f"of {facts.product}",
        )
    elif max(facts.ranks, default=0) >= world:
        rank = max(facts.ranks)
        say.fail(RULE, f"they are of a job of {world} ranks, and rank {rank} captured", rank=rank)
    sizes_traced = {shard.cp_size for shards in trace.shards.values() for shard in shards.values()}
    if facts.context and sizes_traced - set(facts.context):
        size = max(sizes_traced - set(facts.context))
        stated = " or ".join(str(one) for one in sorted(facts.context))
        say.fail(RULE, f"context is divided by {size}, and in the attempt's captures by {stated}")


def _check_lengths(
    trace: Trace, held: Sequence[Held], facts: AttemptFacts, say: RouteFindings
) -> bool:
    """Hold the lengths of trained samples against those consumed; true if any was compared."""
    if facts.lengths is None:
        return False
    fetched = {
        (one.trace_step, one.key): one.valid_length for one in trace.fetches if one.stage == TRAIN
    }
    traced = Counter(fetched.values())
    if not traced:  # without a queue, as far as the shards of micro-batches show what is in them
        known = [one.composition for one in held if one.batch.stage == TRAIN and one.composition]
        traced = Counter({length: 1 for one in known for length in one.lengths})
    for length, count in sorted(traced.items()):
        there = facts.lengths.get(length, 0)
        if count > there:
            say.fail(
                RULE,
                f"they train on {count} samples of {length} tokens, and the attempt consumed "
                f"{there}",
                stage=TRAIN,
            )
            break
    return bool(traced)

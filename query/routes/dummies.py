"""Tokens that were replayed with the dummy route in every layer, which no router chose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trajreplay.query.experts.dummies import FEW_LAYERS, are_lost, chance_of_dummy
from trajreplay.query.routes.composition import Composition
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.installed import assigned_of, source_row
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.shards import Held
from trajreplay.query.routes.topology import Topology
from trajreplay.query.routes.trace import Batch, Trace
from trajreplay.schema.bundles.r3.records import Shard


@dataclass(frozen=True)
class _Token:
    """A token before the last of its sample, and what previews show that it was replayed with.

    Args:
        batch: Its micro-batch.
        ranks: The ranks that replay it, one or some of a pipeline.
        sample: Its sample's number in the micro-batch.
        row: Its row in their shard.
        routes: By layer, its choices.
    """

    batch: Batch
    ranks: tuple[int, ...]
    sample: int
    row: int
    routes: Mapping[int, tuple[int, ...]]

    @property
    def dummies(self) -> set[int]:
        """Layers that have the dummy route."""
        return {layer for layer, row in self.routes.items() if row == tuple(range(len(row)))}

    @property
    def is_dummy(self) -> bool:
        return len(self.dummies) == len(self.routes)


def check_dummies(
    trace: Trace, topology: Topology, held: list[Held], policy: RoutePolicy, say: RouteFindings
) -> None:
    """Check tokens that have the route 0, 1, 2, ... in every layer that is shown.

    The last token of a sample and padding have it, since the sampler returned none; of any other
    it says that its routes were lost, where a sample has more such than chance makes.

    Args:
        trace: The trace.
        topology: Which ranks work together.
        held: What shards hold, where it is known which ranks hold a micro-batch.
        policy: Experts of a layer.
        say: The findings.
    """
    if say.has_failed("tensor.shape", "cp.coverage", "cp.reassembly", "assign.count"):
        return  # which token a row is of is not known
    tokens = list(_tokens(trace, topology, held, policy))
    dummies = [one for one in tokens if one.is_dummy]
    if not dummies:
        return
    experts = policy.experts or _experts(trace, tokens)
    samples: dict[object, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    seen = _seen(tokens)
    for one in tokens:
        top_k = len(next(iter(one.routes.values())))
        expected, count = samples[one.batch, one.ranks, one.sample]
        chance = chance_of_dummy(experts, top_k, [seen[layer] for layer in one.routes])
        samples[one.batch, one.ranks, one.sample] = expected + chance, count + one.is_dummy
    first = dummies[0]
    told = (
        f"{len(dummies)} of {len(tokens)} tokens that are shown, none the last of its sample, have "
        f"the dummy route in every layer; first row {first.row} of micro-batch "
        f"{first.batch.microbatch} in {first.batch.stage} on rank "
        f"{', '.join(map(str, first.ranks))}"
    )
    few = max(len(one.routes) for one in dummies) <= FEW_LAYERS
    lost = are_lost(samples.values())
    if lost and not few:
        say.fail(
            "route.values",
            told,
            stage=first.batch.stage,
            trace_step=first.batch.step,
            microbatch=first.batch.microbatch,
            rank=first.ranks[0],
        )
    elif lost:
        reason = "a router that prefers the first experts makes them in so few layers"
        say.unverified("route.values", f"{told}: {reason}")
    elif len(dummies) == len(tokens):
        say.unverified("route.values", f"{told}: of so few layers and experts chance makes some")


def _seen(tokens: Sequence[_Token]) -> dict[int, tuple[int, int]]:
    """By layer, how many tokens have the dummy route there, of those with another elsewhere."""
    found: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for one in tokens:
        dummies = one.dummies
        for layer in one.routes:
            if len(dummies - {layer}) < len(one.routes) - 1:
                count, total = found[layer]
                found[layer] = count + (layer in dummies), total + 1
    return found


def _experts(trace: Trace, tokens: Sequence[_Token]) -> int:
    """The width of the router's scores, else as many as the largest choice needs."""
    shown = (max(row) for token in tokens for row in token.routes.values())
    return trace.experts or 1 + max(shown)


def _tokens(
    trace: Trace, topology: Topology, held: list[Held], policy: RoutePolicy
) -> Iterator[_Token]:
    by_place = {(one.batch, one.block.ranks): one for one in held}
    pipelines = topology.replicas or tuple((block,) for block in topology.blocks)
    for blocks in pipelines:
        for one in held:
            if one.block is not blocks[0]:
                continue
            places = [by_place.get((one.batch, block.ranks)) for block in blocks]
            there = [found for found in places if found]
            for place, shard in enumerate(one.shards):
                ranks = [found.block.at(place) for found in there]
                inner = _inner(one.shards, place, one.composition)
                yield from _of_shard(trace, one.batch, shard, ranks, inner)
    if topology.blocks:
        return
    for batch, shards in sorted(trace.shards.items()):
        for rank, shard in sorted(shards.items()) if batch.stage in policy.stages else ():
            yield from _of_shard(trace, batch, shard, [(rank,)], _inner([shard], 0, None))


def _inner(shards: Sequence[Shard], place: int, composition: Composition | None) -> dict[int, int]:
    """Rows of a shard known to hold a token before the last of its sample, and which that is."""
    if composition is not None:
        rows = enumerate(composition.rows(place, len(shards)))
        lengths = composition.lengths
        return {row: of for row, (of, at, valid) in rows if valid and at < lengths[of] - 1}
    last: dict[int, int] = {}
    shown = [shard.identity.rows if shard.identity else [] for shard in shards]
    for sample, position, valid in (row for rows in shown for row in rows):
        if valid:
            last[sample] = max(last.get(sample, 0), position)
    here = enumerate(shown[place])
    return {row: of for row, (of, at, valid) in here if valid and at < last[of]}


def _of_shard(
    trace: Trace,
    batch: Batch,
    shard: Shard,
    ranks: Sequence[tuple[int, ...]],
    inner: Mapping[int, int],
) -> Iterator[_Token]:
    """What the ranks of a pipeline, and of each the tensor ranks, assigned to a shard's tokens."""
    count, rows = shard.routes.shape[:2]
    routes: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for number, rank in ((number, rank) for of in ranks for number, rank in enumerate(of)):
        for layer in sorted(trace.layers_of[rank]):
            for assigned in assigned_of(trace, batch, [rank], layer) or []:
                size, *choices = assigned.routes.shape or (0,)
                if len(choices) != 1:
                    continue
                first = number * size if size < count * rows else 0
                for offset, row in enumerate(assigned.routes.rows):
                    if (place := source_row(first + offset, count, rows)) in inner:
                        routes[place][layer] = row
    told = tuple(rank for of in ranks for rank in of)
    for place, found in sorted(routes.items()):
        yield _Token(batch, told, inner[place], place, found)

"""Samples put together again from the shards of micro-batches, and held against the payload."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trajreplay.query.routes.fetched import Share, share_by_block
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.shards import Held
from trajreplay.schema.bundles.r3.records import PayloadSample, TensorRecord

Rows: TypeAlias = list[tuple[int, ...]]
_CODES = {"int8": "b", "uint8": "B", "int16": "h", "int32": "i", "int64": "q"}


@dataclass(frozen=True)
class Put:
    """A sample put together again from the shards of a micro-batch.

    Args:
        held: The micro-batch.
        ranks: All ranks of the replica that replays it.
        tokens: By position; empty where previews do not hold them.
        routes: By position, layers side by side.
    """

    held: Held
    ranks: frozenset[int]
    tokens: tuple[tuple[int, ...], ...]
    routes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Matched:
    """What was put together of the samples of a share.

    Args:
        count: How many samples.
        left: Samples of the share that none of those is.
    """

    count: int
    left: list[PayloadSample]


def match_samples(
    shares: Sequence[Share], put: Sequence[Put], say: RouteFindings
) -> dict[int, Matched]:
    """Find for every sample that was put together one that was fetched, each for one only.

    Samples may be equal, so that those fetched are as many as they are. Where they are a part of
    what was fetched, one may have no partner, unless its tokens have one of other routes.

    Returns:
        What samples were put together of, by the number of their share.
    """
    wrong = {(found.where.get("stage"), found.where.get("key")) for found in say.found}
    of_blocks = share_by_block(shares)
    together: dict[int, list[Put]] = defaultdict(list)
    numbers = {id(share): number for number, share in enumerate(shares)}
    for one in put:
        batch = one.held.batch
        share = of_blocks.get((batch.stage, batch.step, one.held.block.ranks))
        if share and one.held.block in share.blocks:
            together[numbers[id(share)]].append(one)
    matched: dict[int, Matched] = {}
    alone = 0
    for number, mine in together.items():
        matching = _Matching(shares[number], wrong)
        unmatched = [one for one in mine if not matching.take(one)]
        alone += sum(not matching.explain(one, say) for one in unmatched)
        matched[number] = Matched(len(mine), matching.left)
    if alone:
        for rule in ("installed.payload", "cp.reassembly"):
            say.unverified(
                rule,
                f"{alone} of {len(put)} samples put together have no partner: the traces hold a "
                "part of what was fetched for them",
            )
    return matched


class _Matching:
    """Samples of one share, each taken once."""

    def __init__(self, share: Share, wrong: set[tuple[object, object]]) -> None:
        self._share = share
        self._wrong = wrong
        self._free = set(range(len(share.samples)))
        self._by_length: dict[int, list[int]] = defaultdict(list)
        for place, payload in enumerate(share.samples):
            self._by_length[payload.valid_length].append(place)

    @property
    def left(self) -> list[PayloadSample]:
        """Those that were not taken, and that are what was put."""
        return [
            payload
            for place, payload in enumerate(self._share.samples)
            if place in self._free and not self._is_wrong(payload)
        ]

    def take(self, one: Put) -> bool:
        """Take a sample of the tokens and routes that were put together."""
        place = next((place for place in self._equal(one) if place in self._free), None)
        self._free.discard(-1 if place is None else place)
        return place is not None

    def explain(self, one: Put, say: RouteFindings) -> bool:
        """Say what is wrong with a sample that none is left for; false if that is not known."""
        alike = self._by_length[len(one.routes)]
        if any(self._is_wrong(self._share.samples[place]) for place in alike):
            return True  # it is no measure: fetch.hash says so
        if not self._share.is_whole:
            free = [place for place in alike if place in self._free and self._same(one, place)]
            if one.tokens and free and self._share.samples[free[0]].input_ids:
                self._say(one, free[0], "routes", "installed.payload", say)
                return True
            return False
        if equal := self._equal(one):
            self._say_again(one, equal[0], say)
        elif same := sorted(
            (place for place in alike if self._same(one, place)),
            key=lambda place: place not in self._free,
        ):
            self._say(one, same[0], "routes", "installed.payload", say)
        else:
            self._say(one, (*alike, 0)[0], "tokens", "cp.reassembly", say)
        return True

    def _is_wrong(self, payload: PayloadSample) -> bool:
        return (self._share.stage, payload.key) in self._wrong

    def _same(self, one: Put, place: int) -> bool:
        """Whether tokens are equal, as far as both are known."""
        ids = self._share.samples[place].input_ids
        return not one.tokens or ids is None or ids.sha256 == sha256_of(one.tokens, ids)

    def _equal(self, one: Put) -> list[int]:
        """Samples of the tokens and routes that were put together."""
        hashes: dict[str, str | None] = {}
        found = []
        for place in self._by_length[len(one.routes)]:
            routes = self._share.samples[place].routed_experts
            if routes.dtype not in hashes:
                hashes[routes.dtype] = sha256_of(one.routes, routes)
            if routes.sha256 == hashes[routes.dtype] and self._same(one, place):
                found.append(place)
        return found

    def _say(self, one: Put, place: int, what: str, rule: str, say: RouteFindings) -> None:
        payload = self._share.samples[place]
        say.fail(
            rule,
            f"the shards of micro-batch {one.held.batch.microbatch} of {self._share.stage} put "
            f"together are other {what} than those fetched of sample {payload.sample_idx}",
            **self._where(one, payload),
        )

    def _say_again(self, one: Put, place: int, say: RouteFindings) -> None:
        payload = self._share.samples[place]
        say.fail(
            "assign.coverage",
            f"micro-batch {one.held.batch.microbatch} of {self._share.stage} replays sample "
            f"{payload.sample_idx} again, which was fetched once: another is not replayed",
            **self._where(one, payload),
        )

    def _where(self, one: Put, payload: PayloadSample) -> dict[str, object]:
        return {
            "stage": self._share.stage,
            "trace_step": self._share.step,
            "microbatch": one.held.batch.microbatch,
            "sample_idx": payload.sample_idx,
            "key": payload.key,
        }


def tokens_of(one: Held) -> list[Rows] | None:
    """The tokens of each shard, a row each; None where previews do not hold all of them."""
    found = [shard.input_ids for shard in one.shards]
    whole = [ids for ids in found if ids is not None and ids.is_whole]
    if len(whole) < len(found):
        return None
    return [[(value,) for value in ids.preview] for ids in whole]


def gathered(one: Held, shards: list[Rows] | None) -> list[Rows]:
    """The rows of each sample of a micro-batch, in order of position; none where not known."""
    composition = one.composition
    if composition is None or shards is None:
        return []
    found: list[Rows] = [[()] * length for length in composition.lengths]
    for place, rows in enumerate(shards):
        for (sample, position, valid), row in zip(
            composition.rows(place, len(shards)), rows, strict=True
        ):
            if valid:
                found[sample][position] = row
    return found


def sha256_of(rows: Sequence[tuple[int, ...]], like: TensorRecord) -> str | None:
    """The hash of rows as a trace takes it of a tensor of that dtype."""
    try:
        values = array(_CODES[like.dtype], (value for row in rows for value in row))
    except OverflowError:
        return None
    return hashlib.sha256(values.tobytes()).hexdigest()

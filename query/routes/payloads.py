"""Samples put together again from the shards of a micro-batch, and held against the payload."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from typing import TypeAlias

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.shards import Held
from trajreplay.query.routes.trace import Batch
from trajreplay.schema.bundles.r3.records import PayloadSample, TensorRecord

Rows: TypeAlias = list[tuple[int, ...]]
_TOKENS = "cp.reassembly"
_CODES = {"int8": "b", "uint8": "B", "int16": "h", "int32": "i", "int64": "q"}


@dataclass(frozen=True)
class Put:
    """A sample put together again from the shards of a micro-batch.

    Args:
        batch: The micro-batch.
        ranks: All ranks of the replica that replays it.
        tokens: By position.
        routes: By position, layers side by side.
    """

    batch: Batch
    ranks: frozenset[int]
    tokens: tuple[tuple[int, ...], ...]
    routes: tuple[tuple[int, ...], ...]


def check_samples(one: Held, routes: list[Rows], tokens: list[Rows], say: RouteFindings) -> None:
    """Hash what was put together, and look for a fetched sample of that length with the hashes."""
    wrong = {(found.where.get("stage"), found.where.get("key")) for found in say.found}
    used: set[int] = set()
    lengths = one.composition.lengths if one.composition and one.fetched else ()
    for number, length in enumerate(lengths):
        alike = [
            (place, payload)
            for place, payload in enumerate(one.fetched)
            if payload.valid_length == length and place not in used
        ]
        of_tokens = [
            (place, payload)
            for place, payload in alike
            if not tokens
            or payload.input_ids is None
            or payload.input_ids.sha256 == sha256_of(tokens[number], payload.input_ids)
        ]
        found = [
            place
            for place, payload in of_tokens
            if payload.routed_experts.sha256 == sha256_of(routes[number], payload.routed_experts)
        ]
        if found:
            used.add(found[0])
        elif any((one.batch.stage, payload.key) in wrong for _, payload in alike):
            continue  # it is no measure: fetch.hash says so
        elif of_tokens:
            _say_sample(one, of_tokens[0][1], "routes", "installed.payload", say)
        else:
            _say_sample(one, (alike or list(enumerate(one.fetched)))[0][1], "tokens", _TOKENS, say)


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


def _say_sample(
    one: Held, payload: PayloadSample, what: str, rule: str, say: RouteFindings
) -> None:
    say.fail(
        rule,
        f"the shards of micro-batch {one.batch.microbatch} of {one.batch.stage} put together are "
        f"other {what} than those fetched of sample {payload.sample_idx}",
        stage=one.batch.stage,
        trace_step=one.batch.step,
        microbatch=one.batch.microbatch,
        sample_idx=payload.sample_idx,
        key=payload.key,
    )


def sha256_of(rows: Rows, like: TensorRecord) -> str | None:
    """The hash of rows as a trace takes it of a tensor of that dtype."""
    try:
        values = array(_CODES[like.dtype], (value for row in rows for value in row))
    except OverflowError:
        return None
    return hashlib.sha256(values.tobytes()).hexdigest()

"""What captures and heartbeats say of an attempt, for its route traces to be held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from trajreplay.query.files.reading import read_columns
from trajreplay.query.mismatch.consumed import columns_of
from trajreplay.query.routes import AttemptFacts
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import TrajReplayError
from trajreplay.schema.identity import DROPPED
from trajreplay.schema.process import told_process
from trajreplay.schema.tables import STEPS
from trajreplay.stages.gate.counted import role_of
from trajreplay.stages.gate.evidence import Evidence

_TRAINER = "train"


def facts_of(found: Evidence, attempt: int) -> AttemptFacts:
    """What is known of an attempt; what one of its captures contradicts itself in is not used.

    How many steps it took, and what they consumed, is known of the last one alone: of the others
    a later one may have replaced some.
    """
    entries = _entries(found, attempt)
    trainers = [one for one in entries if role_of(one) == _TRAINER]
    processes: dict[int, set[str]] = {}
    worlds: set[int] = set()
    for entry in trainers:
        if (process := told_process(entry.producer)) is not None:
            processes.setdefault(process.rank, set()).add(process.digest)
            worlds.add(process.world)
    sampled = [one for one in trainers if one.key.kind != "events"]
    sizes = {one.parallel for one in sampled}
    products = {
        one.data_size * one.tensor_size * one.pipeline_size * one.context_size for one in sizes
    }
    by_row = any("context_size" in columns_of(one) for one in sampled)
    steps = [one for one, values in found.steps.items() if values.get("attempt") == attempt]
    is_counted = attempt == found.last and attempt in found.telling and bool(steps)
    lengths = None
    if is_counted and found.captured.issuperset(steps):
        lengths = _lengths(found, [one for one in entries if one.key.kind == "step"])
    return AttemptFacts(
        processes=processes,
        worlds=worlds,
        product=products.pop() if len(products) == 1 and not by_row else 1,
        ranks={one.key.rank for one in sampled},
        context=() if by_row else {one.context_size for one in sizes} - {1},
        steps=len(steps) if is_counted else None,
        lengths=lengths,
    )


def _entries(found: Evidence, attempt: int) -> list[Entry]:
    """What was recorded of an attempt, that of its rollouts too which a later one replaced."""
    entries = []
    for key in found.catalog.by_attempt.get((found.run_id, attempt), ()):
        with suppress(TrajReplayError):  # what cannot be read is told by `attempt`
            entry = found.catalog.entry(key)
            if key.part != DROPPED:
                entries.append(entry)
    return entries


def _lengths(found: Evidence, entries: Sequence[Entry]) -> Counter[int]:
    """How many of the samples that steps consumed have so many tokens, each shard's but once."""
    lengths: Counter[int] = Counter()
    for entry in entries:
        if entry.owner and entry.rows:
            names = ["total_length", "context_rank"]
            table = read_columns(found.catalog.store, entry, STEPS, names)
            for total, place in zip(*(table[one].to_pylist() for one in names), strict=True):
                lengths[total] += not (entry.parallel.context_rank if place is None else place)
    return lengths

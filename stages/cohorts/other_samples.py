"""The samples of a step's rollouts that the step did not consume."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.schema.columns import has_column
from trajreplay.stages.cohorts.checks import source_pairs
from trajreplay.stages.cohorts.packed import numbered
from trajreplay.stages.cohorts.sources import Source, Sources

# What every sample has wherever it is packed.
_BASE = ("sample_id", "group_id", "response_length", "total_length", "loss_mask")
_PADDED = "padded_length"
_PLACES = ("source_attempt", "source_rollout_id")


def other_samples(
    table: pa.Table,
    run_id: str,
    sources: Sources,
    names: Collection[str],
    *,
    ranks: Collection[int] | None = None,
) -> pa.Table | str:
    """Columns of the samples of all source rollouts that are not in a step.

    Args:
        table: The samples of the step.
        run_id: The run.
        sources: Its rollouts.
        names: The columns, beside those that every sample has.
        ranks: The ranks of the step, where the rank of each sample matters.

    Returns:
        They, as of the ranks that captured them where that matters, and of none elsewhere; or why
        they cannot be had.
    """
    parts = []
    wanted = sorted({*_BASE, *names})
    for attempt, rollout_id in sorted(source_pairs(table)):
        source = sources.find(run_id, attempt, rollout_id)
        if not isinstance(source, Source):
            return source
        mine, others = _apart(table, source, attempt, rollout_id)
        if ranks is not None and not _same_ranks(mine, source, ranks):
            return f"rollout {rollout_id} was captured by other ranks than consumed it"
        lacking = [
            name for name in wanted if not has_column(others, name) or others[name].null_count
        ]
        if lacking:
            return f"rollout {rollout_id} lacks {lacking[0]} of samples that the step does not hold"
        chosen = others.select(wanted)
        if has_column(table, _PADDED):  # which token was on which context-parallel rank
            stated = has_column(others, _PADDED)
            none = pa.nulls(len(others), pa.int32())
            chosen = chosen.append_column(_PADDED, others[_PADDED] if stated else none)
        if ranks is not None:
            chosen = chosen.append_column("rank", others["rank"]).append_column(
                "row", others["row"]
            )
        for name, value in zip(_PLACES, (attempt, rollout_id), strict=True):
            own = pa.array(np.full(len(others), value), table.schema.field(name).type)
            chosen = chosen.append_column(name, own)
        parts.append(chosen)
    whole = pa.concat_tables(parts).combine_chunks()
    return numbered(whole, -1) if ranks is None else whole


def _apart(
    table: pa.Table, source: Source, attempt: int, rollout_id: int
) -> tuple[pa.Table, pa.Table]:
    """What a step consumed from a rollout, and the samples there that it did not."""
    from_here = pc.and_(
        pc.equal(table[_PLACES[0]], attempt), pc.equal(table[_PLACES[1]], rollout_id)
    )
    mine = table.filter(from_here)
    held = pc.is_in(source.table["sample_id"], value_set=mine["sample_id"].combine_chunks())
    return mine, source.table.filter(pc.invert(held))


def _same_ranks(mine: pa.Table, source: Source, ranks: Collection[int]) -> bool:
    """Whether the ranks of a rollout are those of a step, and held the same samples of it."""
    if sorted(ranks) != sorted(source.ranks):
        return False
    rows = source.rows_of(mine["sample_id"])
    if (rows < 0).any():
        return False
    return bool((source.table["rank"].to_numpy()[rows] == mine["rank"].to_numpy()).all())

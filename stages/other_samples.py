"""The samples of a step's rollouts that the step did not consume."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.schema.columns import has_column
from trajreplay.stages.checks import source_pairs
from trajreplay.stages.packed import numbered
from trajreplay.stages.sources import Source, Sources

# What every sample has wherever it is packed.
_BASE = ("sample_id", "group_id", "response_length", "total_length", "loss_mask")
_PLACES = ("source_attempt", "source_rollout_id")


def other_samples(
    table: pa.Table, run_id: str, sources: Sources, names: Collection[str]
) -> pa.Table | str:
    """Columns of the samples of all source rollouts that are not in a step.

    Args:
        table: The samples of the step.
        run_id: The run.
        sources: Its rollouts.
        names: The columns, beside those that every sample has.

    Returns:
        They, as of one rank that is none; or why they cannot be had.
    """
    parts = []
    wanted = sorted({*_BASE, *names})
    for attempt, rollout_id in sorted(source_pairs(table)):
        source = sources.find(run_id, attempt, rollout_id)
        if not isinstance(source, Source):
            return source
        others = _not_in(table, source, attempt, rollout_id)
        lacking = [
            name for name in wanted if not has_column(others, name) or others[name].null_count
        ]
        if lacking:
            return f"rollout {rollout_id} lacks {lacking[0]} of samples that the step does not hold"
        chosen = others.select(wanted)
        for name, value in zip(_PLACES, (attempt, rollout_id), strict=True):
            own = pa.array(np.full(len(others), value), table.schema.field(name).type)
            chosen = chosen.append_column(name, own)
        parts.append(chosen)
    return numbered(pa.concat_tables(parts).combine_chunks(), -1)


def _not_in(table: pa.Table, source: Source, attempt: int, rollout_id: int) -> pa.Table:
    from_here = pc.and_(
        pc.equal(table[_PLACES[0]], attempt), pc.equal(table[_PLACES[1]], rollout_id)
    )
    mine = table["sample_id"].filter(from_here).combine_chunks()
    return source.table.filter(pc.invert(pc.is_in(source.table["sample_id"], value_set=mine)))
